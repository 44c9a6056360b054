"""What do circuits cost? Milliseconds to draft a window from given laws, and to say the law of windows in training.

    python experiments/circuits.py --windows 4,8,16,32,64 --ranks 8,32 --out circuits.json

Drafting reads a window token by token, as decoding does (`Reader`, in NumPy, each law over the 1,024 likeliest tokens),
or draws all states first, level by level (`sample`); the states' laws of tokens, which the unembedding gives, are there
already. Interleaved, medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saltus.methods.mtpc.circuits import (
    Circuit,
    CircuitFilter,
    chain_circuit,
    independent_circuit,
    mixture_circuit,
    tree_circuit,
)
from saltus.methods.mtpc.network import MAX_CANDIDATE_TOKENS
from saltus.training.data.seeded_generator import seeded_generator

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from reference_circuits import sample_states, token_losses

MADE: dict[str, Callable[[int, int], Circuit]] = {
    "ff": lambda window, rank: independent_circuit(window),
    "cp": mixture_circuit,
    "hmm": chain_circuit,
    "btree": tree_circuit,
}


def parameters(circuit: Circuit, batch: tuple[int, ...], draft: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """start, steps, and the laws of tokens (leaves, where no vocabulary is given)."""
    dice, rank = seeded_generator(0, "circuit"), circuit.rank
    sizes = (rank,), (circuit.num_latents - 1, rank, rank), (circuit.window, rank, *((draft,) if draft else ()))
    start, steps, leaves = (torch.from_numpy(dice.normal(size=(*batch, *size))).float() for size in sizes)
    return start.log_softmax(-1), steps.log_softmax(-1), leaves.log_softmax(-1)


def drafting(circuit: Circuit, draft: int) -> Callable[[], None]:
    start, steps, logs = (part.numpy() for part in parameters(circuit, (), draft))
    distributions = np.exp(logs)

    def run() -> None:
        reader = CircuitFilter(circuit, start, steps)
        for distribution in distributions:  # as `HeadNetwork` does it
            token = int(np.log(np.exp(reader.state_log_weights) @ distribution).argmax())
            reader.observe(np.log(distribution[:, token]))

    return run


def drawing(circuit: Circuit) -> Callable[[], None]:
    start, steps, leaves = parameters(circuit, (1,))
    uniforms = torch.from_numpy(seeded_generator(1, "uniforms").random((1, circuit.num_latents)))

    @torch.inference_mode()
    def run() -> None:
        sample_states(circuit, start, steps, torch.zeros_like(leaves), uniforms)

    return run


def training(circuit: Circuit, windows: int) -> Callable[[], None]:
    start, steps, leaves = (part.requires_grad_() for part in parameters(circuit, (windows,)))

    def run() -> None:
        token_losses(circuit, start, steps, leaves).sum().backward()

    return run


def medians(runs: dict[tuple, Callable[[], None]], repeats: int) -> dict[tuple, float]:
    """Milliseconds of each, in turns."""
    seconds: dict[tuple, list[float]] = {key: [] for key in runs}
    for repeat in range(repeats + 1):
        for key, run in runs.items():
            began = time.perf_counter()
            run()
            if repeat:  # the first warms up
                seconds[key].append(time.perf_counter() - began)
    return {key: 1000 * statistics.median(values) for key, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", default="4,8,16,32,64")
    parser.add_argument("--ranks", default="8")
    parser.add_argument("--draft", type=int, default=MAX_CANDIDATE_TOKENS, help="tokens that a law is over")
    parser.add_argument("--batch", type=int, default=320, help="windows of a training step")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for rank in map(int, options.ranks.split(",")):
        for window in map(int, options.windows.split(",")):
            made = {name: make(window, rank) for name, make in MADE.items()}
            runs: dict[tuple, Callable[[], None]] = {}
            for name, circuit in made.items():
                runs[name, "draft"] = drafting(circuit, options.draft)
                runs[name, "sample"] = drawing(circuit)
                runs[name, "train"] = training(circuit, options.batch)
            found = medians(runs, options.repeats)
            for name, circuit in made.items():
                row = {"circuit": name, "rank": circuit.rank, "window": window, "stages": len(circuit.levels) + 1}
                rows.append(row | {kind: round(found[name, kind], 3) for kind in ("draft", "sample", "train")})
                print(json.dumps(rows[-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
