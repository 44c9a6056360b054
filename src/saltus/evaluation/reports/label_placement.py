"""Place labels beside the points and lines of a figure, where they cover least."""

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
ALIGNMENT_FRACTIONS = {"left": 0.0, "center": 0.5, "right": 1.0}
TEXT_HEIGHT, LETTER_WIDTH = 13.0, 6.3  # of bold letters of ten points


def place_labels(
    axes: Any,
    candidate_points: Mapping[str, Sequence[tuple[float | int, float | int]]],
    text_colours: Mapping[str, str],
    lines: Sequence[Any],
) -> None:
    """Place the label of each system at one of its points (data coordinates), away from other labels and lines."""
    figure = axes.figure
    scale = 72 / figure.dpi
    frame = axes.get_window_extent()
    inside = (frame.x0 * scale, frame.y0 * scale, frame.x1 * scale, frame.y1 * scale)
    taken = [box for line in lines for box in _boxes_along(axes.transData.transform(line.get_xydata()) * scale, inside)]
    taken += [
        _box_around(axes.transData.transform(place) * scale, 6) for some in candidate_points.values() for place in some
    ]
    for system, some in candidate_points.items():
        wide = LETTER_WIDTH * len(system)
        tried = []
        for number, place in enumerate(some):
            x, y = axes.transData.transform(place) * scale
            for rank, (dx, dy, enters) in enumerate(OFFSETS):
                start = x + dx - ALIGNMENT_FRACTIONS[enters] * wide
                box = (start, y + dy - TEXT_HEIGHT / 2, start + wide, y + dy + TEXT_HEIGHT / 2)
                covered = sum(_overlap_area(box, other) for other in taken) + 5 * (
                    wide * TEXT_HEIGHT - _overlap_area(box, inside)
                )
                tried.append((round(covered), number, rank, place, box))
        _, _, rank, place, box = min(tried)
        taken.append(box)
        dx, dy, enters = OFFSETS[rank]
        axes.annotate(system, place, xytext=(dx, dy), textcoords="offset points", ha=enters, va="center",
                      weight="bold", color=text_colours[system], zorder=5)  # fmt: skip


def _boxes_along(points: Any, axes_box: Box) -> list[Box]:
    """Small boxes along a line, those in the axes."""
    boxes = []
    for (x, y), (to_x, to_y) in pairwise(points):
        steps = max(1, min(400, round(max(abs(to_x - x), abs(to_y - y)) / 4)))
        spots = [(x + (to_x - x) * step / steps, y + (to_y - y) * step / steps) for step in range(steps + 1)]
        boxes += [box for box in (_box_around(spot, 2.5) for spot in spots) if _overlap_area(box, axes_box)]
    return boxes


def _box_around(point: Any, radius: float | int) -> Box:
    return point[0] - radius, point[1] - radius, point[0] + radius, point[1] + radius


def _overlap_area(box: Box, other: Box) -> float:
    wide = min(box[2], other[2]) - max(box[0], other[0])
    tall = min(box[3], other[3]) - max(box[1], other[1])
    return max(wide, 0.0) * max(tall, 0.0)
