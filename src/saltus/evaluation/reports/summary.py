"""Summarise a benchmark run in a sentence, unwelcome findings included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Summary:
    """A sentence, the system that it is about, and a note beside it."""

    sentence: str
    system: str | None = None
    note: str = ""


def summarize_results(results: Mapping[str, Any]) -> Summary:
    """The fastest of our methods against plain decoding, or the fastest baseline if there is no method."""
    systems = results["methods"]
    compared = {system: row for system, row in systems.items() if system != "plain" and row["speedup"] is not None}
    ours = {system: row for system, row in compared.items() if row["kind"] == "method"}
    able = ours or compared
    if not able:
        return Summary("Nothing was compared with plain decoding.")
    best = max(able, key=lambda system: able[system]["speedup"])
    row = able[best]
    same = row["identical"] is not None and row["identical"] == row["texts"]
    low, high = row["ci95"].get("speedup") or (row["speedup"], row["speedup"])
    bounds = f" [{low:.2f}, {high:.2f}]" if row["ci95"].get("speedup") else ""
    texts = f"{row['texts']} text{'s' * (row['texts'] != 1)}"
    sentence = (
        f"{best} wrote {'the same ' if same else ''}{texts} {row['speedup']:.2f} × as fast as plain decoding{bounds}"
    )
    sentence += _caveats(row, low, high) + "."
    beside = f"The fastest of {len(able)} {'methods' if ours else 'baselines'}." if len(able) > 1 else ""
    return Summary(sentence, best, beside)


def _caveats(row: Mapping[str, Any], lower_bound: float | int, upper_bound: float | int) -> str:
    doubts = []
    if upper_bound < 1:
        doubts.append("which is slower")
    elif lower_bound <= 1:
        doubts.append("no clear difference")
    if row["identical"] is None:
        doubts.append("with other random numbers, so the texts are not compared")
    elif row["identical"] < row["texts"]:
        count = row["texts"] - row["identical"]
        doubts.append("but not one of them is plain's" if not row["identical"] else f"but {count} of them differ")
    if row["problems"]:
        count = len(row["problems"])
        doubts.append(f"and {count} problem{'s were' if count > 1 else ' was'} found")
    return "".join(f", {doubt}" for doubt in doubts)
