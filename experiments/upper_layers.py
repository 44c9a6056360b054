"""What do heads' adapted layers cost: read a second time after the verifying call, or as more rows of that call?

    python experiments/upper_layers.py --layers 1,2,4 --length 200 --out upper_layers.json

*After*: the last N layers read the rows that were accepted, after the call (what Saltus does). *Within*: every node of
the call has a second row in its last N layers, since it is not known yet which are accepted: what these layers take for
twice the rows, less what they take for the call's own. Low-rank products of the second rows, which the weights after
have merged, are left out of it, and so are their keys and values: a lower bound. Before each reading other memory is
read, as the rest of a model is in between. Interleaved, medians, milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import saltus
from saltus.evaluation.reports.environment import git_commit, machine_info
from saltus.kernels.native import kernel_threads_only
from saltus.methods.mtpc.upper_layers import last_layers
from saltus.methods.shared.context_layers import ContextLayers
from saltus.methods.shared.context_rows import ContextKVCache
from saltus.training.data.seeded_generator import seeded_generator


class Reading:
    """Some of the model's last layers, after a text of a given length."""

    def __init__(self, target: Any, layers: int, length: int) -> None:
        self.reader, self.memory, self.length = ContextLayers(last_layers(target, layers)), ContextKVCache(), length
        self.inputs = torch.from_numpy(
            seeded_generator(0, "rows").normal(size=(length + 64, target.config.hidden_size))
        )
        self.inputs = self.inputs.to(target.dtype)
        self.reader(self.inputs[:length], self.memory, 0, 1, output_logits=False)

    def seconds(self, rows: int) -> float:
        began = time.perf_counter()
        self.reader(self.inputs[:rows], self.memory, self.length, 1, output_logits=False)
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--layers", default="1,2,4")
    parser.add_argument("--length", type=int, default=200, help="tokens of the text so far")
    parser.add_argument("--nodes", default="4,8", help="drafts of a call")
    parser.add_argument("--accepted", type=int, default=2, help="tokens that a step decides")
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    target = saltus.load(chosen.model, "plain").network.model
    nodes = [int(each) for each in chosen.nodes.split(",")]
    readings = {int(each): Reading(target, int(each), chosen.length) for each in chosen.layers.split(",")}
    counts = sorted({chosen.accepted, *(1 + each for each in nodes), *(2 + 2 * each for each in nodes)})
    found: dict[tuple[int, int], list[float]] = {(layers, rows): [] for layers in readings for rows in counts}
    other = np.zeros(2**24)  # 128 MB
    with torch.inference_mode(), kernel_threads_only():
        for repeat in range(chosen.repeats + 1):
            for layers, rows in found:
                other += 1  # weights leave the caches
                seconds = readings[layers].seconds(rows)
                if repeat:  # the first warms up
                    found[layers, rows].append(seconds)
    medians = {key: 1000 * statistics.median(values) for key, values in found.items()}
    rows = [
        {
            "layers": layers,
            "nodes": each,
            "after": round(medians[layers, chosen.accepted], 2),
            "within": round(medians[layers, 2 + 2 * each] - medians[layers, 1 + each], 2),
        }
        for layers in readings
        for each in nodes
    ]
    for row in rows:
        print(json.dumps(row))
    if chosen.out:
        told = {"machine": machine_info(), "commit": git_commit(), "length": chosen.length, "rows": rows}
        chosen.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
