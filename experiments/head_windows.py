"""What do heads draft on held-out texts? Tokens a call of chains, and each folder's figure over the first one's.

    python experiments/head_windows.py --states runs/ff/states --heads ff cp --out head_windows.json

The windows are those of the texts that training held out, the same ones for all heads with the same states, `seed`,
`window` and `validation_fraction`. Intervals are 95 % by resampling texts; a quotient is of the means over texts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import saltus
from saltus.evaluation.reports.environment import git_commit, machine_info
from saltus.methods.mtpc.files import load_heads
from saltus.methods.mtpc.training.heads import HeadsTrainingTask
from saltus.training.data.hidden_states import load_hidden_states
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.window_dataset import WindowSettings


def with_interval(values: np.ndarray, base: np.ndarray) -> list[float]:
    """The quotient of two means over the same texts, and its 95 % interval."""
    rows = seeded_generator(0, "texts").integers(len(values), size=(4000, len(values)))
    edges = np.quantile(values[rows].mean(1) / base[rows].mean(1), (0.025, 0.975))
    return [round(float(number), 4) for number in (values.mean() / base.mean(), *edges)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=Path, required=True, help="those of a work folder of saltus train mtpc")
    parser.add_argument("--heads", type=Path, nargs="+", required=True, help="folders of saltus train mtpc")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto", help="of the model, as in training")
    parser.add_argument("--windows", type=int, default=60, help="of each text")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    target = saltus.load(chosen.model, "plain", dtype=chosen.dtype).network.model
    corpus = load_hidden_states(chosen.states)
    rows: list[dict[str, Any]] = []
    first: dict[str, np.ndarray] = {}
    for folder in chosen.heads:
        heads = load_heads(folder, target, chosen.model).float()
        settings = WindowSettings(**json.loads((folder / "saltus.json").read_text())["training"]["recipe"]["data"])
        task = HeadsTrainingTask(
            target, corpus, heads.shape, window_settings=settings, target_name=chosen.model, initial_module=heads
        )
        for kind in ("greedy", "sampled"):
            counts = task.window_tokens(kind == "greedy", chosen.windows).numpy()
            means = counts.reshape(-1, chosen.windows).mean(1)
            row = {"heads": folder.name, "texts": kind, "count": len(means)}
            row |= {"tokens_per_call": with_interval(means, np.ones_like(means))}
            row |= {"over_first": with_interval(means, first.setdefault(kind, means))}
            rows.append(row)
            print(json.dumps(row), flush=True)
    if chosen.out:
        result = {"machine": machine_info(), "commit": git_commit(), "rows": rows}
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
