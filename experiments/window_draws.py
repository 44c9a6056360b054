"""What does a draft of heads cost under `reject`? Token by token, and drawn at once in a stage for each level.

    python experiments/window_draws.py --windows 8,16,32 --out window_draws.json

Untrained heads for the default model, whose weights do not change the work: each draft is a pass of the heads and
tokens to the end of the window, at temperature 1. Drafts of all kinds in turn; milliseconds, median and least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import saltus
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.core.noise import Noise
from saltus.core.rules import reject
from saltus.core.sampling import Sampling
from saltus.evaluation.reports.environment import git_commit, machine_info
from saltus.methods.mtpc.drawn_window import draft_drawn_window
from saltus.methods.mtpc.heads import HeadShape, new_head_model
from saltus.methods.mtpc.network import HeadNetwork
from saltus.methods.shared.autoregressive import draft_autoregressively
from saltus.training.data.seeded_generator import seeded_generator

SAMPLING = Sampling(temperature=1.0)


def drafts(network: HeadNetwork, window: int, hidden: int) -> dict[str, Callable[[int], int]]:
    """Both ways to draft a window; each returns how many tokens it drafted."""
    states = torch.from_numpy(seeded_generator(0, "states").normal(size=(64, 1, hidden))).bfloat16()

    def run(draw: str, number: int) -> int:
        canvas = continuation([1, 2, 3 + number], window + 1)
        inputs = ForwardInputs(canvas, network_name="mtpc", hidden_states=states[number % len(states)])
        given = inputs, window, 0.0, Noise(number), SAMPLING
        calls = (
            draft_drawn_window(*given, "mtpc") if draw == "window" else draft_autoregressively(*given, reject, "mtpc")
        )
        kv_cache = network.new_kv_cache()
        try:
            inputs = next(calls)
            while True:
                inputs = calls.send(network.forward([inputs], [kv_cache])[0])
        except StopIteration as end:
            return len(end.value[0].tokens)

    return {draw: lambda number, draw=draw: run(draw, number) for draw in ("tokens", "window")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", default="8,16,32")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192, help="tokens that are drafted")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    target = saltus.load("smollm2-135m", "plain", weights="bf16").model
    tokens = torch.arange(options.vocabulary)
    hidden = target.config.hidden_size
    runs: dict[tuple[str, int, str], Callable[[int], int]] = {}
    for window in map(int, options.windows.split(",")):
        for circuit in ("ff", "cp", "hmm", "btree"):
            shape = HeadShape(hidden, circuit=circuit, window=window, rank=options.rank)
            model = new_head_model(shape, tokens, target, seeded_generator(0, circuit)).bfloat16().eval()
            for draw, run in drafts(HeadNetwork(model, None), window, hidden).items():
                runs[circuit, window, draw] = run
    seconds: dict[tuple[str, int, str], list[float]] = {key: [] for key in runs}
    for number in range(options.repeats + 1):
        for key, run in runs.items():
            began = time.perf_counter()
            drafted = run(number)
            assert drafted == key[1], f"{key} drafted {drafted} tokens"
            if number:  # the first warms up
                seconds[key].append(time.perf_counter() - began)
    rows = []
    for (circuit, window, draw), found in seconds.items():
        median, least = (round(1000 * one, 2) for one in (statistics.median(found), min(found)))
        rows.append({"circuit": circuit, "window": window, "draw": draw, "ms": median, "least_ms": least})
        print(json.dumps(rows[-1]), flush=True)
    if options.out:
        made = {"machine": machine_info(), "commit": git_commit(), "command": sys.argv, "rows": rows}
        options.out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
