"""Draw how often each query of an adapter is right, given the uniforms that wrote the text, and given others.

    python experiments/accuracy_by_depth.py ADAPTER docs/assets/accuracy_by_depth.png

`saltus train ptp` measures both on windows of held-out texts and writes them to the adapter's saltus.json. The
difference is what the adapter reads from the uniforms.
"""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt

from saltus.evaluation.reports.palette import COLOURS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("figure", type=Path)
    given = parser.parse_args()
    card = json.loads((given.adapter / "saltus.json").read_text())["training"]
    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for (name, shares), colour in zip(card["accuracy_by_depth"].items(), COLOURS, strict=False):
        look = {"marker": colour.marker, "markersize": 4, "color": colour.light}
        axes.plot(range(len(shares)), shares, label=f"given {name}", **look)
    axes.set(xlabel="query", ylabel="share of right tokens", ylim=(0, 1), title=f"after {card['steps']:,} steps")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(given.figure, dpi=150)


if __name__ == "__main__":
    main()
