"""Measure what a step costs: our loop against Transformers' generate, calls by nodes and by text, memory by tokens.

    python benchmarks/step_cost.py --out docs/assets

Everything is measured in one run, in turns: each figure is the median over rounds, and ratios are taken round by round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from speedup import commit, machine
from transformers import AutoModelForCausalLM

import saltus
from saltus.core.canvas import continuation
from saltus.core.forward import Forward
from saltus.networks.loading import load_checkpoint
from saltus.networks.sources import resolve

NODES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (128, 256, 512, 1024, 2048)
console = Console(width=110)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--dtypes", default="bfloat16,float32")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--tokens", type=int, default=64, help="written by each side of a round")
    options.add_argument("--out", type=Path, help="folder for step_cost.json, step_cost.png and step_cost.svg")
    args = options.parse_args()
    found = {"machine": machine(), "commit": commit(), "rounds": args.rounds, "dtypes": {}}
    for dtype in args.dtypes.split(","):
        found["dtypes"][dtype] = {
            "plain": against_generate(args.model, dtype, args.rounds, args.tokens),
            "calls": calls(args.model, dtype, args.rounds),
            "memory": memory(args.model, dtype),
        }
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "step_cost.json").write_text(json.dumps(found, indent=1))
        plot(found, args.out)


def against_generate(model: str, dtype: str, rounds: int, tokens: int) -> dict:
    """Plain decoding by our loop and by Transformers, prefill included, in turns."""
    engine = saltus.load(model, method="plain", dtype=dtype)
    theirs = AutoModelForCausalLM.from_pretrained(resolve(model), dtype=getattr(torch, dtype)).eval()
    question = "Explain in a few sentences why the sky is blue and what changes at sunset."
    prompt = torch.tensor([engine.encode(question)])

    def ours() -> float:
        engine.shelf.kept.clear()
        made = engine.generate(question, max_new_tokens=tokens, ignore_eos=True)
        seconds = made.statistics.seconds
        around.append((seconds - sum(call.seconds for call in made.steps)) / len(made.steps))
        return seconds

    def generate() -> float:
        started = time.perf_counter()
        theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=tokens,
            min_new_tokens=tokens, pad_token_id=0,
        )  # fmt: skip
        return time.perf_counter() - started

    around: list[float] = []
    ours(), generate()
    around.clear()
    pairs = [(ours(), generate()) for _ in range(rounds)]
    result = {
        "tokens_per_second": tokens / statistics.median(own for own, _ in pairs),
        "generate_tokens_per_second": tokens / statistics.median(other for _, other in pairs),
        "ratio": statistics.median(other / own for own, other in pairs),
        "ms_around_a_call": 1000 * statistics.median(around),
    }
    console.print(f"{dtype}, plain, {tokens} tokens:", {key: round(value, 2) for key, value in result.items()})
    return result


def calls(model: str, dtype: str, rounds: int) -> list[dict]:
    """Milliseconds of a call by its nodes (the last decided token included) and by the text before it."""
    network = load_checkpoint(model, "cpu", dtype, True, None).network
    text = np.random.default_rng(0).integers(100, 40_000, size=max(LENGTHS) + max(NODES))
    rows = []
    for length in LENGTHS:
        memory_ = network.memory()
        canvas = continuation(text[:length], max(NODES))
        asks = [Forward(canvas, tuple(text[length : length + n - 1].tolist()), tuple(range(-1, n - 2))) for n in NODES]
        prefill = network.forward([asks[0]], [memory_])[0].seconds
        times = [[network.forward([ask], [memory_])[0].seconds for ask in asks] for _ in range(rounds + 1)][1:]
        rows += [
            {"length": length, "nodes": n, "ms": 1000 * statistics.median(column), "prefill_ms": 1000 * prefill}
            for n, column in zip(NODES, zip(*times, strict=True), strict=True)
        ]
    table = Table(title=f"{dtype}: milliseconds of a call, by nodes and length of the text")
    for column in ("length", *map(str, NODES), "prefill"):
        table.add_column(column, justify="right")
    for length in LENGTHS:
        here = [row for row in rows if row["length"] == length]
        table.add_row(str(length), *(f"{row['ms']:.1f}" for row in here), f"{here[0]['prefill_ms']:.0f}")
    console.print(table)
    return rows


def memory(model: str, dtype: str) -> dict:
    """Slots that a text's memory fills, after calls of many nodes that are nearly all rejected."""
    network = load_checkpoint(model, "cpu", dtype, True, None).network
    kept, text, slots = network.memory(), np.arange(100, 164), []
    for _ in range(32):
        ask = Forward(continuation(text, 64), tuple(range(32)), (-1,) * 32)
        network.forward([ask], [kept])
        text = np.append(text, 5)
        slots.append((len(text) - 1, len(kept.tokens)))
    assert kept.keys is not None
    assert kept.values is not None
    each = sum(buffer[:, :, 0].numel() * buffer.element_size() for buffer in (kept.keys, kept.values))
    result = {
        "bytes_of_a_token": each,
        "slots_over_decided_tokens": max(filled - decided for decided, filled in slots),
        "capacity": kept.keys.shape[2],
    }
    console.print(f"{dtype}, memory:", result)
    return result


def plot(found: dict, folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(found["dtypes"]), figsize=(5 * len(found["dtypes"]), 4), squeeze=False)
    for axis, (dtype, part) in zip(axes[0], found["dtypes"].items(), strict=True):
        for length in LENGTHS:
            here = [row for row in part["calls"] if row["length"] == length]
            axis.plot([row["nodes"] for row in here], [row["ms"] for row in here], marker="o", label=f"{length} tokens")
        axis.set_xscale("log", base=2)
        axis.set_xticks(NODES, list(map(str, NODES)))
        axis.set_ylim(bottom=0)
        axis.set_xlabel("nodes of a call")
        axis.set_ylabel("milliseconds")
        axis.set_title(f"{dtype}: a call after a text of …")
        axis.legend()
        axis.grid(alpha=0.3)
    figure.text(0.01, 0.01, f"{found['machine']}; {found['commit']}", fontsize=6)
    figure.tight_layout()
    for kind in ("png", "svg"):
        figure.savefig(folder / f"step_cost.{kind}", dpi=150)


if __name__ == "__main__":
    main()
