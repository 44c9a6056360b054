"""Small Python programs with their output: texts for training, and prompts whose answers can be graded.

    python experiments/programs.py --out runs/programs
    python experiments/bytes_target.py --text runs/programs/text --length 384 --work runs/programs/target --out programs

A byte-level target of a few million parameters learns to predict the output, so its answers can be graded before and
after it is trained for faster decoding. Python computes every answer. `text` holds the programs, with an empty line
between two; `prompts.jsonl` has prompts made of some of them, for saltus collect; `held_out.jsonl` has programs that
are not in the text, with their answers, for experiments/forcing.py.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from saltus.training.data.seeded_generator import seeded_generator

LONGEST = 320  # bytes of a program and its answer
SHORTEST = 48  # bytes of an answer
BEGINS, ENDS = "\n#\n", "\n\n"  # of an answer
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"


def word(draw: np.random.Generator) -> str:
    syllables = int(draw.integers(2, 4))
    return "".join(str(draw.choice([*kind])) for _ in range(syllables) for kind in (CONSONANTS, VOWELS))


def words(draw: np.random.Generator) -> str:
    return " ".join(word(draw) for _ in range(draw.integers(4, 10)))


def times(draw: np.random.Generator) -> str:
    first, factor = draw.integers(2, 60), draw.integers(2, 13)
    return f'for i in range({first}, {first + draw.integers(5, 13)}): print(i, "*", {factor}, "=", i * {factor})'


def plus(draw: np.random.Generator) -> str:
    first, other = draw.integers(10, 800), draw.integers(10, 200)
    return f'for i in range({first}, {first + draw.integers(5, 12)}): print(i, "+", {other}, "=", i + {other})'


def up(draw: np.random.Generator) -> str:
    first, stride = draw.integers(1, 300), draw.integers(2, 30)
    return f"print(*range({first}, {first + stride * draw.integers(15, 40)}, {stride}))"


def down(draw: np.random.Generator) -> str:
    last, stride = draw.integers(1, 300), draw.integers(2, 30)
    return f"print(*range({last + stride * draw.integers(15, 40)}, {last}, -{stride}))"


def lengths(draw: np.random.Generator) -> str:
    return f'for word in "{words(draw)}".split(): print(word, len(word))'


def capitals(draw: np.random.Generator) -> str:
    return f'for n, word in enumerate("{words(draw)}".split(), {draw.integers(1, 90)}): print(n, word.upper())'


def backwards(draw: np.random.Generator) -> str:
    return f'print(*reversed("{words(draw)}".split()))'


def ordered(draw: np.random.Generator) -> str:
    return f'for word in sorted("{words(draw)}".split()): print(word)'


def fizz(draw: np.random.Generator) -> str:
    first, divisor = draw.integers(1, 200), draw.integers(2, 8)
    many = draw.integers(15, 40)
    return f'for i in range({first}, {first + many}): print("{word(draw)}" if i % {divisor} == 0 else i)'


def stairs(draw: np.random.Generator) -> str:
    return f'for i in range(1, {draw.integers(6, 12)}): print(i, "{word(draw)[:2]}" * i)'


def sums(draw: np.random.Generator) -> str:
    numbers = [int(each) for each in draw.integers(1, 90, size=draw.integers(8, 16))]
    return f'total = 0\nfor i in {numbers}:\n    total += i\n    print("+", i, "=", total)'


KINDS: tuple[Callable[[np.random.Generator], str], ...] = (
    times, plus, up, down, lengths, capitals, backwards, ordered, fizz, stairs, sums,
)  # fmt: skip


def printed(program: str) -> str:
    """The output of a program, without the last newline."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(program, {})
    return out.getvalue().rstrip("\n")


def programs(count: int, seed: int) -> list[tuple[str, str, str]]:
    """This many different programs: kind, program and answer of each."""
    draw, unique = seeded_generator(seed, "programs"), {}
    while len(unique) < count:
        kind = KINDS[draw.integers(len(KINDS))]
        program = kind(draw)
        answer = printed(program)
        if len(answer) >= SHORTEST and len(program + BEGINS + answer + ENDS) <= LONGEST:
            unique.setdefault(program, (kind.__name__, program, answer))
    return list(unique.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/programs"))
    parser.add_argument("--count", type=int, default=60_000, help="programs for training")
    parser.add_argument("--prompts", type=int, default=1000, help="of these, as prompts for the model")
    parser.add_argument("--held-out", type=int, default=200, help="programs that are held out")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    examples = programs(options.count + options.held_out, options.seed)
    training, held_out = examples[: options.count], examples[options.count :]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "text").write_text("".join(program + BEGINS + answer + ENDS for _, program, answer in training))
    for name, rows in (("prompts", training[: options.prompts]), ("held_out", held_out)):
        with (options.out / f"{name}.jsonl").open("w") as out:
            for kind, program, answer in rows:
                row = {"source": kind, "prompt": program + BEGINS, "answer": answer, "stop": ENDS}
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
