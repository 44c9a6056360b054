"""Colours and marks of systems: the same in every figure, and distinct also for colour-blind readers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

INK, MUTED, LINE, BAND, BACKGROUND, ALARM = "#1b1f24", "#5f6771", "#d8dce1", "#f2f4f7", "#ffffff", "#b3261e"
"""Of figures on white; the page puts its own in their place, by day and by night."""


@dataclass(frozen=True)
class Colour:
    """A colour for light backgrounds, one for dark backgrounds, and a mark."""

    name: str
    light: str
    dark: str
    marker: str


PLAIN = Colour("grey", "#707782", "#9aa3af", "o")
COLOURS = (
    Colour("blue", "#0072b2", "#58b4f0", "o"),
    Colour("orange", "#c94c00", "#ff9050", "s"),
    Colour("green", "#00805e", "#3ecb9c", "D"),
    Colour("purple", "#a8488c", "#e493cb", "^"),
    Colour("ochre", "#8f6600", "#e3b23c", "v"),
    Colour("indigo", "#4a4ab0", "#a3a3ff", "P"),
    Colour("wine", "#882255", "#e8749c", "X"),
    Colour("teal", "#00747a", "#4cc9d0", "h"),
)
COLOUR_BY_SYSTEM = {
    system: COLOURS[number]
    for number, system in enumerate(
        ("lookup", "jacobi", "jacobi+lookup", "small_model", "transformers", "transformers-lookup",
         "transformers-assistant")
    )
}  # fmt: skip


def assign_colours(systems: Iterable[str]) -> dict[str, Colour]:
    """The colour of each system: grey for plain, a fixed one for known systems, a free one for others."""
    names = list(systems)
    given = {system: COLOUR_BY_SYSTEM[system] for system in names if system in COLOUR_BY_SYSTEM}
    free = [colour for colour in COLOURS if colour not in given.values()] or list(COLOURS)
    others = [system for system in names if system not in given and system != "plain"]
    given |= {system: free[number % len(free)] for number, system in enumerate(others)}
    return {system: PLAIN if system == "plain" else given[system] for system in names}
