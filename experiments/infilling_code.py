"""A missing line of code, filled by a model that sees both sides: pass@1 on HumanEval's single lines.

    python experiments/infilling_code.py --tasks HumanEval-SingleLineInfilling.jsonl.gz --model my-code --out code

Tasks are of Bavarian et al. (2022). A program passes if its tests do, in a confined process; each task is tried once a
seed. A model without blanks, such as an XLNet, is given the line's length in tokens, and any model with
`--length-given`, as in the published evaluation. Beside it: a causal model that continues the left side (`--causal`),
and a line that is left empty, since some programs pass without theirs. Of long programs the nearest `--context` tokens
are read, a third of them after the hole.
"""

import argparse
import gzip
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

import saltus
from saltus.engine.infill_template import InfillTemplate
from saltus.evaluation.benchmarks import program_assembly
from saltus.evaluation.reports.environment import git_commit, machine_info
from saltus.evaluation.sandbox.run_program import run_tests

OPEN = 32  # tokens that a line may have


@dataclass
class Answers:
    """What a way filled in, and what that took."""

    lines: list[str]
    tokens: int = 0
    calls: int = 0
    seconds: float = 0.0


def num_tokens(engine: saltus.Engine, text: str) -> int:
    return len(engine.tokenizer(text, add_special_tokens=False).input_ids)


def trimmed(engine: saltus.Engine, text: str, tokens: int, right: bool = False) -> str:
    """The lines nearest to the hole that have so many tokens at most."""
    kept: list[str] = []
    lines = text.splitlines(keepends=True)
    for line in lines if right else lines[::-1]:
        tokens -= num_tokens(engine, line)
        if tokens < 0:
            break
        kept.append(line)
    return "".join(kept if right else kept[::-1])


def infilled(engine: saltus.Engine, method: str, rows: list[dict], seed: int, given: argparse.Namespace) -> Answers:
    """Each task's line: the first of what fills the hole. A line end after it is given; the model ends the hole."""
    found, context = Answers([]), given.context
    knows_length = given.length_given or engine.network.blank_token is None
    for row in track(rows, f"{method}, seed {seed}"):
        before = trimmed(engine, row["prompt"], context * 2 // 3)
        after = "\n" + trimmed(engine, row["suffix"], context // 3, right=True)
        line = row["canonical_solution"].rstrip("\n")
        fixed = max(num_tokens(engine, line), 1) if knows_length else None
        began = time.perf_counter()
        template = InfillTemplate((before, after), (fixed,))
        one = engine.infill(template, method=method, open_tokens=OPEN, seed=seed, temperature=given.temperature)
        found.seconds += time.perf_counter() - began
        found.lines.append(one.fillings[0].partition("\n")[0])
        found.tokens += one.statistics.tokens
        found.calls += len(one.calls)
    return found


def continued(engine: saltus.Engine, rows: list[dict], seed: int, temperature: float, context: int) -> Answers:
    """What a causal model writes after the left side, up to the line's end."""
    found = Answers([])
    for row in track(rows, f"left to right, seed {seed}"):
        before = trimmed(engine, row["prompt"], context)
        engine.decoder.prefix_tree.clear()
        began = time.perf_counter()
        one = engine.generate(before, max_new_tokens=OPEN, seed=seed, temperature=temperature, stop=["\n"], raw=True)
        found.seconds += time.perf_counter() - began
        found.lines.append(one.text.partition("\n")[0])
        found.tokens += len(one.tokens)
        found.calls += len(one.calls)
    return found


def passed(rows: list[dict], lines: list[str], known: dict[tuple[str, str], bool]) -> list[bool]:
    """By each task's tests; a line that is `known` is not run again."""
    asked = [(row["task_id"], line) for row, line in zip(rows, lines, strict=True)]
    new = {one: row for one, row in zip(asked, rows, strict=True) if one not in known}
    made = [program_assembly.infilling(row, line + "\n") for (_, line), row in new.items()]
    with ThreadPoolExecutor(2) as pool:
        known.update(zip(new, (verdict.passed for verdict in pool.map(run_tests, made)), strict=True))
    return [known[one] for one in asked]


def ways(given: argparse.Namespace, rows: list[dict]) -> Iterator[tuple[str, Callable[[int], Answers]]]:
    engine = saltus.load(given.model, "assd", tuned_settings=False)
    for method in given.methods:
        yield method, lambda seed, method=method: infilled(engine, method, rows, seed, given)
    if given.causal:
        other = saltus.load(given.causal, "plain", tuned_settings=False)
        yield "left to right", lambda seed: continued(other, rows, seed, given.temperature, given.context)
    yield "an empty line", lambda _seed: Answers([""] * len(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=Path, required=True, help="of HumanEval infilling, .jsonl or .jsonl.gz")
    parser.add_argument("--model", required=True, help="an any-subset model of code")
    parser.add_argument("--methods", nargs="+", default=["assd", "plain"], help="that write the same lines")
    parser.add_argument("--causal", help="a causal model, to compare with")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--length-given", action="store_true", help="tell the model how many tokens the line has")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--limit", type=int, help="tasks, evenly spread; all otherwise")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    opened: Any = gzip.open if given.tasks.suffix == ".gz" else open
    with opened(given.tasks, "rt", encoding="utf-8") as source:
        rows = [json.loads(line) for line in source]
    count = min(given.limit or len(rows), len(rows))
    rows = [rows[i * len(rows) // count] for i in range(count)]
    table, known = [], {}
    for name, fill in ways(given, rows):
        found = [fill(seed) for seed in range(given.seeds)]
        right = np.array([passed(rows, answers.lines, known) for answers in found], dtype=float)  # [seeds, tasks]
        same = [
            line.strip() == row["canonical_solution"].strip()
            for answers in found
            for row, line in zip(rows, answers.lines, strict=True)
        ]
        share, by_task = float(right.mean()), right.mean(0)
        tokens, calls = (sum(getattr(answers, key) for answers in found) for key in ("tokens", "calls"))
        table.append(
            {
                "way": name,
                "tasks": len(rows),
                "seeds": given.seeds,
                "pass@1": round(share, 4),
                "error": round(float(by_task.std(ddof=1)) / math.sqrt(len(rows)), 4),  # over tasks, not tries
                "the very line": round(sum(same) / len(same), 4),
                "tokens_per_call": round(tokens / calls, 3) if calls else None,
                "seconds": round(sum(answers.seconds for answers in found), 1),
            }
        )
        print(json.dumps(table[-1]), flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    papers = {"machine": machine_info(), "commit": git_commit(), "command": sys.argv}
    (given.out / "infilling_code.json").write_text(json.dumps({"table": table, **papers}, indent=1) + "\n")


if __name__ == "__main__":
    main()
