"""Format results as tables of Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(map(str, cells))} |" for cells in (heads, ["---"] * len(heads), *rows)]


def where_it_ran(lines: Sequence[dict[str, Any]]) -> list[str]:
    """GPU, versions, commits and commands of a file's runs."""
    runs = [line["run"] for line in lines if "run" in line]
    machine = runs[0]["machine"]
    commits = dict.fromkeys(run["commit"] or "unknown" for run in runs)
    named = machine["gpu"] or machine["processor"]
    return [
        f"{named}, PyTorch {machine['torch']}, Transformers {machine['transformers']}, commit {', '.join(commits)}:"
        f" `{runs[0]['command']}`"
    ]
