"""Measure what methods are worth on a file of prompts, by category: tokens per second against plain in the same run.

    python benchmarks/speedup.py --prompts spec_bench.jsonl --methods lookup,jacobi,jacobi+lookup

Each prompt is written by every method in turn, plain first and last by turns, so that a machine that drifts hurts all
alike. A warm-up comes before; prefill counts. The median of the ratios of single prompts stands beside the ratio of
sums.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections import defaultdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import saltus


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--prompts", type=Path, required=True, help="JSON lines with turns (the first counts)")
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--methods", default="lookup,jacobi,jacobi+lookup")
    options.add_argument("--max-new-tokens", type=int, default=64)
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--dtype", default="auto")
    options.add_argument("--every", type=int, default=1, help="take every n-th prompt")
    options.add_argument("--out", type=Path, help="write everything measured here, as JSON")
    args = options.parse_args()

    rows = [json.loads(line) for line in args.prompts.read_text().splitlines()][:: args.every]
    methods = ["plain", *args.methods.split(",")]
    engine = saltus.load(args.model, dtype=args.dtype)
    settings = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "seed": args.seed}
    for method in methods:
        engine.generate("Say hello to the world, then say it again.", method=method, **settings)
    measured = []
    for number, row in enumerate(track(rows, console=Console(stderr=True))):
        order = methods if number % 2 else methods[::-1]
        written = {}
        for method in order:
            engine.shelf.kept.clear()  # every method reads the prompt itself
            written[method] = engine.generate(row["turns"][0], method=method, **settings)
        for method in methods:
            made = written[method].statistics
            measured.append(
                {
                    "prompt": row.get("question_id", number), "category": row.get("category", "all"), "method": method,
                    "same": written[method].tokens == written["plain"].tokens, "tokens": made.tokens,
                    "calls": made.calls, "seconds": made.seconds, "prefill": made.prefill_seconds,
                    "nodes": made.nodes_per_call, "ms_per_call": made.ms_per_call,
                }
            )  # fmt: skip
    report = {"settings": vars(args) | {"machine": machine(), "commit": commit()}, "measured": measured}
    if args.out:
        args.out.write_text(json.dumps(report, default=str, indent=1))
    show(measured, methods)


def show(measured: list[dict], methods: list[str]) -> None:
    table = Table(title="tokens a second against plain: ratio of sums (median of prompts), tokens a call, same texts")
    for column in ("category", *methods[1:]):
        table.add_column(column)
    groups = defaultdict(list)
    for row in measured:
        groups[row["category"]].append(row)
    for category, group in [*groups.items(), ("all", measured)]:
        cells = []
        for method in methods[1:]:
            plain, own = ([row for row in group if row["method"] == name] for name in ("plain", method))
            ratio = sum(row["seconds"] for row in plain) / sum(row["seconds"] for row in own)
            middle = statistics.median(p["seconds"] / o["seconds"] for p, o in zip(plain, own, strict=True))
            calls = sum(row["tokens"] for row in own) / sum(row["calls"] for row in own)
            same = sum(row["same"] for row in own)
            cells.append(f"{ratio:.2f} ({middle:.2f})  {calls:.2f}  {same}/{len(own)}")
        table.add_row(category, *cells)
    Console(width=120).print(table)


def machine() -> str:
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return f"{asked.stdout.strip()}, {time.strftime('%Y-%m-%d')}"


if __name__ == "__main__":
    main()
