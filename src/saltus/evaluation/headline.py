"""Say in a sentence what a benchmark run found, the unwelcome parts included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Headline:
    """A sentence, the side it is about, and what must be said beside it."""

    sentence: str
    side: str | None = None
    beside: str = ""


def headline(results: Mapping[str, Any]) -> Headline:
    """The fastest of our methods against plain decoding (the fastest peer where there is none); never a peer's sum."""
    sides = results["methods"]
    compared = {side: one for side, one in sides.items() if side != "plain" and one["speedup"] is not None}
    ours = {side: one for side, one in compared.items() if one["kind"] == "method"}
    able = ours or compared
    if not able:
        return Headline("Nothing was compared with plain decoding.")
    best = max(able, key=lambda side: able[side]["speedup"])
    one = able[best]
    same = one["identical"] is not None and one["identical"] == one["texts"]
    low, high = one["ci95"].get("speedup") or (one["speedup"], one["speedup"])
    bounds = f" [{low:.2f}, {high:.2f}]" if one["ci95"].get("speedup") else ""
    texts = f"{one['texts']} text{'s' * (one['texts'] != 1)}"
    sentence = (
        f"{best} wrote {'the same ' if same else ''}{texts} {one['speedup']:.2f} × as fast as plain decoding{bounds}"
    )
    sentence += _doubts(one, low, high) + "."
    beside = f"The fastest of {len(able)} {'methods' if ours else 'peers'}." if len(able) > 1 else ""
    return Headline(sentence, best, beside)


def _doubts(one: Mapping[str, Any], low: float | int, high: float | int) -> str:
    doubts = []
    if high < 1:
        doubts.append("which is slower")
    elif low <= 1:
        doubts.append("no clear difference")
    if one["identical"] is None:
        doubts.append("with other dice, so the texts are not compared")
    elif one["identical"] < one["texts"]:
        count = one["texts"] - one["identical"]
        doubts.append("but not one of them is plain's" if not one["identical"] else f"but {count} of them differ")
    if one["problems"]:
        count = len(one["problems"])
        doubts.append(f"and {count} problem{'s were' if count > 1 else ' was'} found")
    return "".join(f", {doubt}" for doubt in doubts)
