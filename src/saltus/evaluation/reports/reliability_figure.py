"""Plot how true the probabilities are that drafters state: a reliability diagram of each drafter, with all systems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from saltus.evaluation.reports.drafters import MIN_TOKENS_OF_BIN, each_drafter, reliability
from saltus.evaluation.reports.palette import BACKGROUND, LINE, MUTED, assign_colours

MAX_COLUMNS, PANEL, GAP = 3, 152, 42  # panels beside each other, and pixels of one and between two
TOP, BOTTOM, LEFT, LEGEND_LINE = 92, 46, 52, 17


def draw_reliability(results: Mapping[str, Any], width: int) -> Any:
    """The accepted share against the mean stated probability, by bins; None without enough draft tokens."""
    from matplotlib.figure import Figure

    panels: dict[str, dict[str, list[tuple[float, float, int]]]] = {}
    for system, name, drafter in each_drafter(results):
        if points := reliability(drafter):
            panels.setdefault(name, {})[system] = points
    if not panels:
        return None
    paint = assign_colours(results["methods"])
    systems = [system for system in results["methods"] if any(system in lines for lines in panels.values())]
    rows = -(-len(panels) // MAX_COLUMNS)
    height = TOP + rows * (PANEL + GAP) - GAP + BOTTOM + LEGEND_LINE * len(systems)
    figure = Figure(figsize=(width / 100, height / 100))
    figure.text(14 / width, 1 - 12 / height, "Are the stated probabilities true?", size=12.5, weight="bold", va="top")
    subtitle = (
        "share of the drafted tokens that were accepted, by the probability that the drafter stated;\n"
        f"larger: more tokens, at least {MIN_TOKENS_OF_BIN}; on the line: calibrated, below it: overconfident"
    )
    figure.text(14 / width, 1 - 35 / height, subtitle, size=9, color=MUTED, va="top")
    for number, (name, lines) in enumerate(panels.items()):
        row, column = divmod(number, MAX_COLUMNS)
        left, top = LEFT + column * (PANEL + GAP), TOP + row * (PANEL + GAP)
        box = left / width, 1 - (top + PANEL) / height, PANEL / width, PANEL / height
        axes = figure.add_axes(box)
        axes.set_title(name, size=9.5, weight="bold", loc="left")
        axes.plot([0, 1], [0, 1], color=LINE, lw=1.4, zorder=1)
        for system, points in lines.items():
            x, y, counts = zip(*points, strict=True)
            colour, most = paint[system], max(counts)
            axes.plot(x, y, color=colour.light, lw=1.4, alpha=0.7, zorder=2)
            sizes = [10 + 50 * count / most for count in counts]
            axes.scatter(x, y, s=sizes, marker=colour.marker, color=colour.light, ec=BACKGROUND, lw=0.6, zorder=3)
        axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        axes.tick_params(labelleft=not column)
    figure.text(LEFT / width, (BOTTOM + LEGEND_LINE * len(systems) - 34) / height, "stated probability", size=9.5,
                color=MUTED, va="center")  # fmt: skip
    for number, system in enumerate(reversed(systems)):
        y, colour = (10 + LEGEND_LINE * number) / height, paint[system]
        axes = figure.add_axes((14 / width, y - 8 / height, 16 / width, 16 / height))
        axes.set_axis_off()
        axes.plot([0], [0], colour.marker, color=colour.light, ms=6)
        figure.text(36 / width, y, system, size=9.5, weight="bold", color=colour.light, va="center")
    return figure
