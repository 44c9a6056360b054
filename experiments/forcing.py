"""What Jacobi Forcing brings: tokens a call, tokens a second and quality, of models before and after training.

    python experiments/forcing.py BASE TUNED … --prompts held_out.jsonl [--text enwik8.xz] [--adapter DIR …] --out DIR

Each model is decoded greedily and at a temperature: plainly, and by Jacobi decoding of 1, 2, … blocks (`--max-blocks`)
without rejection recycling, and with it, of tails and of diagonals. Every text is written by all ways in turn,
forwards and backwards, and by all models before the next text. `--whole` asks for every guess that there is, so that
tokens a call are those of the method; without it a controller asks for those that pay. Speed-ups are over plain
decoding of the same model, prefill included. All ways must write the same text of a model, or the run ends.
`--adapter` decodes BASE with guesses that an adapter corrects.

Quality is the share of prompts that are answered as `answer` says, up to `stop`, and of the words of answers that stand
in their places, where the file of prompts has both (experiments/programs.py); with `--text` also bits a token of text
that no model was trained on: the second half of windows of 256 bytes.
"""

import argparse
import itertools
import json
import lzma
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import saltus
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.engine.decoder import MAX_DRAFT_TOKENS
from saltus.evaluation.reports.environment import git_commit, machine_info

PLAIN, RECYCLED = "plain", 4  # candidates
POOLS = {"": "", ", recycling tails": "tails", ", recycling diagonals": "diagonals"}
WINDOWS, LENGTH = 64, 256


def bits(engine: saltus.Engine, text: bytes) -> float:
    """Of a token, on average, with half a window or more before it."""
    found = []
    step = max((len(text) - LENGTH) // WINDOWS, 1)
    for start in range(0, step * WINDOWS, step):
        tokens = torch.tensor([engine.tokenizer(text[start : start + LENGTH].decode(errors="ignore")).input_ids])
        with torch.inference_mode():
            kv_cache = engine.network.new_kv_cache()
            half = tokens.shape[1] // 2
            logits = []
            for at in range(half, tokens.shape[1], 120):
                chain = tuple(tokens[0, at : at + 120].tolist())
                inputs = ForwardInputs(continuation(tokens[0, :at].numpy(), 1), chain, tuple(range(-1, len(chain) - 1)))
                logits.append(engine.network.forward([inputs], [kv_cache])[0].logits[: len(chain)].float())
        distributions = torch.cat(logits).log_softmax(-1)
        found.append(float(-distributions.gather(-1, tokens[0, half:, None]).mean()))
    return statistics.fmean(found) / math.log(2)


def graded(
    name: str, engine: saltus.Engine, questions: list[dict[str, Any]], tokens: int, temperature: float
) -> list[dict[str, Any]]:
    """How many are answered right, by the model's own text."""
    known = [one for one in questions if "answer" in one]
    if not known:
        return []
    how = {"max_new_tokens": max(tokens, 256), "temperature": temperature, "ignore_eos": True}
    found = engine.generate([one["prompt"] for one in known], stop=known[0].get("stop"), **how)
    right = [text.text == one["answer"] for text, one in zip(found, known, strict=True)]
    items = statistics.fmean(share_right(text.text, one["answer"]) for text, one in zip(found, known, strict=True))
    kinds = sorted({one.get("source", "") for one in known})
    told = {
        kind: sum(r for r, one in zip(right, known, strict=True) if one.get("source", "") == kind) for kind in kinds
    }
    grade = {"model": name, "temperature": temperature, "right": sum(right), "of": len(right), "items": round(items, 4)}
    grade["by_kind"] = told
    print(json.dumps(grade), flush=True)
    return [grade]


def share_right(text: str, answer: str) -> float:
    """Of the answer's words and numbers, those that stand in their places."""
    pairs = itertools.zip_longest(answer.split(), text.split()[: len(answer.split())])
    return statistics.fmean(ours == theirs for ours, theirs in pairs)


def read_end(file: Path, share: float = 0.01) -> bytes:
    opener = lzma.open if file.suffix == ".xz" else open
    with opener(file, "rb") as source:
        text = source.read()
    return text[-int(len(text) * share) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--adapter", action="append", default=[])
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="its last hundredth was held out")
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument(
        "--graded", type=int, default=200, help="prompts whose answers are graded, where they have some"
    )
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-blocks", type=int, nargs="+", default=[1, 2], help="how many decode at once")
    parser.add_argument("--recycle", nargs="+", default=[*POOLS.values()], help="kinds of recycling; '' is none")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    questions = [json.loads(line) for line in given.prompts.read_text().splitlines()]
    inputs = questions[: given.texts]
    grades = []
    held = read_end(given.text) if given.text else None
    sides: list[tuple[str, saltus.Engine]] = []
    quality: dict[str, float] = {}
    for where in given.models:
        engine = saltus.load(where, "plain", tuned_settings=False)
        if held is not None:
            quality[where] = round(bits(engine, held), 4)
        for temperature in (0.0, given.temperature):
            grades += graded(where, engine, questions[: given.graded], given.tokens, temperature)
        sides.append((where, engine))
    for folder in given.adapter:
        sides.append((folder, saltus.load(given.models[0], "plain", tuned_settings=False)))
    engines: dict[tuple[str, str], saltus.Engine] = {}
    for name, engine in sides:
        pools = [(way, recycle) for way, recycle in POOLS.items() if recycle in given.recycle]
        for max_blocks, (way, recycle) in itertools.product(given.max_blocks, pools):
            chosen = {
                "block_size": given.block_size,
                "max_blocks": max_blocks,
                "candidates": RECYCLED if recycle else 0,
            }
            chosen |= {"model": name} if name in given.adapter else {}
            chosen |= {"recycle": recycle} if recycle else {}
            recycled = {"": 0, "tails": given.block_size, "diagonals": 3}[recycle] * RECYCLED
            max_draft_tokens = min(given.block_size * max_blocks + recycled, MAX_DRAFT_TOKENS) if given.whole else 32
            engines[name, f"{max_blocks} blocks{way}"] = engine.copy_with(
                options={"jacobi": chosen}, max_draft_tokens=max_draft_tokens, adaptive=not given.whole
            )
        engines[name, PLAIN] = engine
    rows: dict[tuple[str, str, float], list[tuple[int, int, float]]] = {}
    order = list(engines)
    for temperature in (0.0, given.temperature):
        how = {"max_new_tokens": given.tokens, "temperature": temperature, "ignore_eos": True}
        for key in order:
            engines[key].generate(inputs[-1]["prompt"], method=PLAIN if key[1] == PLAIN else "jacobi", **how)
        for number in range(given.rounds):
            for place, question in enumerate(inputs):
                texts: dict[str, list[int]] = {}
                for key in order if (number + place) % 2 == 0 else order[::-1]:
                    engines[key].decoder.prefix_tree.clear()
                    began = time.perf_counter()
                    method = PLAIN if key[1] == PLAIN else "jacobi"
                    found = engines[key].generate(
                        question["prompt"], method=method, seed=place, stop=question.get("stop"), **how
                    )
                    taken = time.perf_counter() - began
                    if texts.setdefault(key[0], found.tokens) != found.tokens:
                        sys.exit(f"{key} wrote another text than another way with the same model")
                    counted = found.statistics
                    rows.setdefault((*key, temperature), []).append((counted.tokens, counted.calls, taken))
    table = []
    for (name, way, temperature), found in rows.items():
        plain = rows[name, PLAIN, temperature]
        tokens, calls, _ = (sum(column) for column in zip(*found, strict=True))
        ratios = [one[2] / other[2] for one, other in zip(plain, found, strict=True)]
        table.append({
            "model": name, "way": way, "temperature": temperature, "tokens_per_call": round(tokens / calls, 3),
            "tokens_per_second": round(tokens / sum(one[2] for one in found), 1),
            "speedup": round(statistics.median(ratios), 3),
        })  # fmt: skip
        print(json.dumps(table[-1]), flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    told = {
        "table": table,
        "grades": grades,
        "bits": quality,
        "machine": machine_info(),
        "commit": git_commit(),
        "command": sys.argv,
    }
    (given.out / "forcing.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
