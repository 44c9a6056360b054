"""Write names beside the points and lines of a figure, where they cover the least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

Box = tuple[float, float, float, float]
"""Left, bottom, right and top, in points."""

OFFSETS = (
    (9, 7, "left"), (9, -7, "left"), (-9, 7, "right"), (-9, -7, "right"), (0, 15, "center"), (0, -15, "center"),
    (9, 20, "left"), (9, -20, "left"), (-9, 20, "right"), (-9, -20, "right"),
)  # fmt: skip
ENTERS = {"left": 0.0, "center": 0.5, "right": 1.0}
TALL, LETTER = 13.0, 6.3  # of bold letters of ten points


def label(
    axes: Any,
    places: Mapping[str, Sequence[tuple[float | int, float | int]]],
    inks: Mapping[str, str],
    drawn: Sequence[Any],
) -> None:
    """Name each side at one of its places (data coordinates), apart from each other and from the drawn lines."""
    figure = axes.figure
    scale = 72 / figure.dpi
    frame = axes.get_window_extent()
    inside = (frame.x0 * scale, frame.y0 * scale, frame.x1 * scale, frame.y1 * scale)
    taken = [box for line in drawn for box in _along(axes.transData.transform(line.get_xydata()) * scale, inside)]
    taken += [_around(axes.transData.transform(place) * scale, 6) for some in places.values() for place in some]
    for side, some in places.items():
        wide = LETTER * len(side)
        tried = []
        for number, place in enumerate(some):
            x, y = axes.transData.transform(place) * scale
            for rank, (dx, dy, enters) in enumerate(OFFSETS):
                start = x + dx - ENTERS[enters] * wide
                box = (start, y + dy - TALL / 2, start + wide, y + dy + TALL / 2)
                covered = sum(_overlap(box, other) for other in taken) + 5 * (wide * TALL - _overlap(box, inside))
                tried.append((round(covered), number, rank, place, box))
        _, _, rank, place, box = min(tried)
        taken.append(box)
        dx, dy, enters = OFFSETS[rank]
        axes.annotate(side, place, xytext=(dx, dy), textcoords="offset points", ha=enters, va="center",
                      weight="bold", color=inks[side], zorder=5)  # fmt: skip


def _along(points: Any, inside: Box) -> list[Box]:
    """Small boxes along a line, those in the axes."""
    boxes = []
    for (x, y), (to_x, to_y) in pairwise(points):
        steps = max(1, min(400, round(max(abs(to_x - x), abs(to_y - y)) / 4)))
        spots = [(x + (to_x - x) * step / steps, y + (to_y - y) * step / steps) for step in range(steps + 1)]
        boxes += [box for box in (_around(spot, 2.5) for spot in spots) if _overlap(box, inside)]
    return boxes


def _around(point: Any, reach: float | int) -> Box:
    return point[0] - reach, point[1] - reach, point[0] + reach, point[1] + reach


def _overlap(one: Box, other: Box) -> float:
    wide = min(one[2], other[2]) - max(one[0], other[0])
    tall = min(one[3], other[3]) - max(one[1], other[1])
    return max(wide, 0.0) * max(tall, 0.0)
