"""Plot what `saltus tune` measured: calls by nodes with the most draft tokens, and the surface of speed-ups."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from saltus.evaluation.profiling.jacobi_tuning import SpeedupSurface
from saltus.evaluation.reports.benchmark_plots import STYLE, render
from saltus.evaluation.reports.palette import ALARM, INK, LINE, MUTED

WIDTH, HEIGHT = 600, 400  # pixels, where an inch is 100
LEFT_MARGIN, BOTTOM_MARGIN, TOP_MARGIN = 58, 50, 80


def write_figures(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """tune_calls and tune_surface, as SVG and as PNG; none of a search that measured no settings. The files' paths."""
    if not result["surface"]["points"]:
        return []
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        drawn = {"tune_calls": _plot_calls(result), "tune_surface": _plot_surface(result)}
    paths = []
    for name, figure in drawn.items():
        for kind in ("svg", "png"):
            paths.append(folder / f"{name}.{kind}")
            paths[-1].write_bytes(render(figure, kind))
    return paths


def _new_figure(title: str, subtitle: str, right_margin: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100))
    figure.text(14 / WIDTH, 1 - 12 / HEIGHT, title, size=12.5, weight="bold", va="top")
    figure.text(14 / WIDTH, 1 - 35 / HEIGHT, subtitle, size=9, color=MUTED, va="top")
    place = (
        LEFT_MARGIN / WIDTH,
        BOTTOM_MARGIN / HEIGHT,
        (WIDTH - LEFT_MARGIN - right_margin) / WIDTH,
        (HEIGHT - BOTTOM_MARGIN - TOP_MARGIN) / HEIGHT,
    )
    return figure, figure.add_axes(place)


def _plot_calls(result: Mapping[str, Any]) -> Any:
    nodes, times = zip(*((row["nodes"], row["ms"]) for row in result["calls"]), strict=True)
    figure, axes = _new_figure(
        "Milliseconds of a call", f"{result['model']['name']}; dashed: the nodes that the search may use", 24
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(nodes, list(map(str, nodes)))
    axes.minorticks_off()
    axes.plot(nodes, times, "o-", color=INK, lw=1.8, ms=4.5)
    axes.axvline(result["max_draft_tokens"], color=ALARM, ls="--", lw=1.4)
    if result["knee"]:
        axes.axvline(result["knee"], color=MUTED, ls=":", lw=1.4)
        axes.annotate("knee", (result["knee"], 0.96), xycoords=("data", "axes fraction"), xytext=(4, 0),
                      textcoords="offset points", size=8.5, color=MUTED)  # fmt: skip
    axes.set_ylim(0, 1.06 * max(times))
    axes.set_xlabel("nodes of a call, the last decided token included")
    axes.set_ylabel("ms")
    axes.grid(axis="y", color=LINE, lw=0.6)
    return figure


def _plot_surface(result: Mapping[str, Any]) -> Any:
    points = [(row["block_size"], row["candidates"], row["speedup"]) for row in result["surface"]["points"]]
    surface = SpeedupSurface.fit(points)
    blocks, counts = sorted({point[0] for point in points}), sorted({point[1] for point in points})
    figure, axes = _new_figure(
        "Speed-up over plain decoding", f"{result['model']['name']}; dots: measured, the ring: chosen", 90
    )
    x = np.linspace(np.log2(blocks[0]), np.log2(blocks[-1]), 60)
    y = np.linspace(0, np.log2(1 + counts[-1]), 60)
    heights = surface.evaluate(2 ** x[None, :], 2 ** y[:, None] - 1) if len(blocks) > 1 else None
    if heights is not None:
        heights = np.broadcast_to(heights, (60, 60))
        filled = axes.contourf(x, y, heights, levels=10, cmap="Blues", alpha=0.8)
        bar = figure.colorbar(
            filled, cax=figure.add_axes((1 - 74 / WIDTH, BOTTOM_MARGIN / HEIGHT, 14 / WIDTH, 270 / HEIGHT))
        )
        bar.outline.set_visible(False)
    for block, count, value in points:
        at = np.log2(block), np.log2(1 + count)
        axes.plot(*at, "o", color=INK, ms=3)
        axes.annotate(f"{value:.2f}", at, xytext=(0, 9), textcoords="offset points", ha="center", size=8, color=INK)
    best = result["chosen"]
    if "block_size" in best:
        axes.plot(
            np.log2(best["block_size"]), np.log2(1 + best["candidates"]), "o", mfc="none", mec=ALARM, ms=13, mew=1.8
        )
    axes.set_xticks(np.log2(blocks), list(map(str, blocks)))
    axes.set_yticks(np.log2(1 + np.array(counts)), list(map(str, counts)))
    axes.set_xlim(x[0] - 0.2, x[-1] + 0.2)
    axes.set_ylim(-0.15, y[-1] + 0.35)
    axes.set_xlabel("tokens of a block")
    axes.set_ylabel("recycled n-grams offered")
    return figure
