"""The tables of taxi_ptp.py as Markdown: the mean over seeds, and the standard deviation if there are several.

python experiments/taxi_tables.py runs/results/*.json > tables.md
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

METHODS = {
    "one-hot": "O-PTP",
    "categorical": "C-PTP",
    "independent": "independent",
    "exact marginals": "exact marginals",
}
TITLES = {
    "methods": "Methods",
    "losses": "Losses and proposals (Table 4)",
    "embeddings": "Embeddings of uniforms (Table 5)",
    "places": "Placement of uniforms, Beta(b, b) (Table 6)",
    "drafts": "Several drafts (Table 7)",
    "windows": "Fewer queries in a call (Table 8)",
    "inverse": "Inverse training: perplexity (Table 1)",
}
VARIED = {
    "methods": (),
    "losses": ("proposal", "loss"),
    "embeddings": ("kind",),
    "places": ("b",),
    "drafts": ("drafts",),
    "windows": ("limit",),
    "inverse": ("model",),
}  # the columns of a table, besides the method
SHOWN = ("correct", "perplexity", "perplexity of second halves", "perplexity in windows")


def read(files: Iterable[Path]) -> list[dict[str, Any]]:
    """All rows of some files."""
    return [row for file in files for row in json.loads(file.read_text())["rows"]]


def group_rows(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], dict[tuple, dict[str, list[float]]]]:
    """By table and window, then by line: the measured values, one for each seed."""
    tables: dict[tuple[str, int], dict[tuple, dict[str, list[float]]]] = {}
    for row in rows:
        run, measured = row["run"], row["measured"]
        table = tables.setdefault((row["table"], run.get("window", 0)), {})
        line = (METHODS.get(run.get("form"), ""), *(run.get(name, "") for name in VARIED[row["table"]]))
        for name in SHOWN:
            if name in measured:
                table.setdefault(line, {}).setdefault(name, []).append(measured[name])
    return tables


def spread(values: list[float]) -> str:
    """The mean, and the standard deviation over seeds."""
    mean = statistics.fmean(values)
    return f"{mean:.2f} ± {statistics.stdev(values):.2f} ({len(values)} seeds)" if len(values) > 1 else f"{mean:.2f}"


def markdown(name: str, window: int, table: Mapping[tuple, Mapping[str, list[float]]]) -> str:
    """One table, a line for each method and setting."""
    columns = [column for column in SHOWN if any(column in line for line in table.values())]
    heads = ["method", *VARIED[name], *(column.replace("correct", "correct tokens") for column in columns)]
    lines = [f"### {TITLES[name]}" + (f", N = {window}" if window else ""), ""]
    lines += ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for line, values in table.items():
        cells = [str(cell) for cell in line] + [spread(values[one]) if one in values else "" for one in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="files that --out wrote")
    for (name, window), table in group_rows(read(parser.parse_args().files)).items():
        print(markdown(name, window, table))


if __name__ == "__main__":
    main()
