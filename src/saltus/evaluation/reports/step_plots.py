"""Plot step costs: calls by nodes and text length, the roofline with its knee, and the parts of calls and steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from saltus.evaluation.reports.benchmark_plots import STYLE, save_figures, titled_figure
from saltus.evaluation.reports.markdown import cores_and_threads
from saltus.evaluation.reports.palette import ALARM, BACKGROUND, INK, LINE, MUTED

WIDTH, HEIGHT = 600, 400  # pixels, where an inch is 100
BLUES = ("#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#084594")  # short texts to long ones
PART_COLOURS = {
    "embedding": "#e3b23c", "attention": "#0072b2", "linear layers": "#9aa3af", "unembedding": "#c94c00",
    "norms and rotary": "#a8488c", "rest": "#d8dce1", "drafting and tree": "#0072b2", "sampling": "#c94c00",
    "rule": "#00805e", "Python and the rest": "#d8dce1",
}  # fmt: skip
PARTS_AROUND_CALL = ("drafting and tree", "sampling", "rule", "Python and the rest")
DARK_COLOURS = {"#0072b2", "#c94c00", "#a8488c", "#00805e"}


def write_figures(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write every figure that has data, as SVG and as PNG (1,200 pixels wide). The files' paths."""
    return save_figures(draw_figures(result), folder)


def draw_figures(result: Mapping[str, Any]) -> dict[str, Any]:
    """The matplotlib figures by name, without those that have no data."""
    import matplotlib

    drawings = {"step_calls": _plot_calls, "step_roofline": _plot_roofline, "step_parts": _plot_parts}
    with matplotlib.rc_context(STYLE):
        drawn = {name: drawing(result) for name, drawing in drawings.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _new_figure(title: str, subtitle: str, height: int = HEIGHT) -> Any:
    return titled_figure(WIDTH, height, title, subtitle)


def _add_time_axes(figure: Any, nodes: Sequence[int], right_margin: int) -> Any:
    """Axes of milliseconds by nodes, with free pixels on the right for labels."""
    axes = figure.add_axes((54 / WIDTH, 50 / HEIGHT, (WIDTH - 54 - right_margin) / WIDTH, (HEIGHT - 50 - 80) / HEIGHT))
    axes.set_xscale("log", base=2)
    axes.set_xticks(nodes, list(map(str, nodes)))
    axes.minorticks_off()
    axes.set_xlabel("nodes of a call, the last decided token included")
    axes.grid(axis="y", color=LINE, lw=0.6)
    axes.set_axisbelow(True)
    return axes


def _model_and_machine(result: Mapping[str, Any]) -> str:
    machine, model = result["machine"], result["model"]
    where = (
        machine["gpu"]
        if model["device"].startswith("cuda")
        else f"{machine['processor']}, {cores_and_threads(machine)}"
    )
    return f"{model['name']}, {model['dtype']}; {where}"


def _plot_calls(result: Mapping[str, Any]) -> Any:
    """A line for each length of the text, named at its end."""
    rows = [row for row in result["calls"] if row["batch"] == 1]
    if not rows:
        return None
    nodes, lengths = (sorted({row[name] for row in rows}) for name in ("nodes", "length"))
    figure = _new_figure("Milliseconds of a call", _model_and_machine(result))
    axes = _add_time_axes(figure, nodes, right_margin=104)
    ends = []
    for number, length in enumerate(lengths):
        here = [row for row in rows if row["length"] == length]
        colour = BLUES[-1 - (len(lengths) - 1 - number) * len(BLUES) // max(len(lengths), 5)]
        x, y = [row["nodes"] for row in here], [row["ms"] for row in here]
        axes.fill_between(x, [row["low"] for row in here], [row["high"] for row in here], color=colour, alpha=0.2, lw=0)
        axes.plot(x, y, "o-", color=colour, lw=1.8, ms=4.5)
        ends.append((y[-1], f"{length:,}" + (" tokens" if number == len(lengths) - 1 else ""), colour))
    axes.set_ylim(0, 1.06 * max(row["high"] for row in rows))
    _label_line_ends(axes, nodes[-1], ends)
    axes.annotate(
        "after a text of", (1, 1), xycoords="axes fraction", xytext=(8, 8), textcoords="offset points", ha="center",
        size=8.5, color=MUTED,
    )  # fmt: skip
    axes.set_ylabel("ms")
    return figure


def _label_line_ends(axes: Any, x: float | int, ends: Sequence[tuple[float, str, str]]) -> None:
    """Labels right of the last points, moved apart if they would touch."""
    low, high = axes.get_ylim()
    least, at = 0.062 * (high - low), float("-inf")
    for y, label, colour in sorted(ends):
        at = max(y, at + least)
        axes.annotate(label, (x, at), xytext=(10, 0), textcoords="offset points", va="center", size=9.5,
                      color=colour if colour not in BLUES[:3] else BLUES[3], annotation_clip=False)  # fmt: skip


def _plot_roofline(result: Mapping[str, Any]) -> Any:
    """Measured calls above the bounds of reading and computing, on two logarithmic scales."""
    length = result["settings"]["batch_length"]
    rows = [row for row in result["calls"] if row["length"] == length and row["batch"] == 1 and "floor_ms" in row]
    if len(rows) < 2:
        return None
    nodes = [row["nodes"] for row in rows]
    speed, model = result["speed"], result["model"]
    subtitle = f"after {length:,} tokens; {speed['bytes_per_second'] / 1e9:,.0f} GB/s, "
    subtitle += f"{speed['flops_per_second'] / 1e12:.2g} TFLOP/s measured; {model['name']}, {model['dtype']}"
    figure = _new_figure("A call and the least it could cost", subtitle)
    axes = _add_time_axes(figure, nodes, right_margin=112)
    axes.set_yscale("log")
    columns = {name: [row[name] for row in rows] for name in ("ms", "memory_ms", "compute_ms", "floor_ms")}
    bottom = 0.5 * min(columns["floor_ms"])
    axes.set_ylim(bottom, 1.5 * max(columns["ms"]))
    for line in ("memory_ms", "compute_ms"):
        axes.fill_between(nodes, bottom, columns[line], color="#eceef1", lw=0, zorder=0.5)
    axes.plot(nodes, columns["memory_ms"], "--", color=BLUES[2], lw=1.4)
    axes.plot(nodes, columns["compute_ms"], "--", color="#c94c00", lw=1.4)
    axes.plot(nodes, columns["ms"], "o-", color=INK, lw=1.8, ms=5)
    ticks = _log_ticks(bottom, 1.5 * max(columns["ms"]))
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.set_ylabel("ms")
    for row, alignment in ((rows[0], "center"), (rows[-1], "right")):
        axes.annotate(f"{row['efficiency']:.0%}", (row["nodes"], row["ms"]), xytext=(0, 8), textcoords="offset points",
                      ha=alignment, size=9, color=INK)  # fmt: skip
    _label_line_ends_log(axes, nodes[-1], [
        (columns["ms"][-1], "measured\n(%: floor of it)", INK), (columns["memory_ms"][-1], "reading", BLUES[3]),
        (columns["compute_ms"][-1], "computing", "#c94c00"),
    ])  # fmt: skip
    _mark_knees(axes, result, length, rows)
    return figure


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, … within the bounds."""
    from math import floor, log10

    tens = range(floor(log10(low)), floor(log10(high)) + 1)
    return [step * 10.0**ten for ten in tens for step in (1, 2, 5) if low <= step * 10.0**ten <= high]


def _label_line_ends_log(axes: Any, x: float | int, ends: Sequence[tuple[float, str, str]]) -> None:
    """`_label_line_ends` on a logarithmic scale."""
    low, high = axes.get_ylim()
    at = 0.0
    for y, label, colour in sorted(ends):
        lines = 1 + label.count("\n")
        at = max(y, at * (high / low) ** (0.04 * (lines + 1)))
        axes.annotate(label, (x, at), xytext=(12, 0), textcoords="offset points", va="center", size=9.5, color=colour,
                      annotation_clip=False)  # fmt: skip


def _mark_knees(axes: Any, result: Mapping[str, Any], length: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """A drop line at the knee of the bound, and one where a call costs a quarter more than a call of one node."""
    knee = next(each for each in result["knees"] if each["length"] == length)
    bottom = axes.get_ylim()[0]
    marks = []
    if rows[0]["nodes"] < knee["predicted"] < rows[-1]["nodes"]:
        marks.append((knee["predicted"], rows[0]["memory_ms"], "bends at", MUTED))
    if knee["measured"] is not None:
        marks.append((knee["measured"], 1.25 * rows[0]["ms"], "+25 % at", ALARM))
    for x, top, label, colour in marks:
        axes.plot([x, x], [bottom, top], ":", color=colour, lw=1.3, zorder=1)
        axes.plot([x], [top], "D", color=BACKGROUND, mec=colour, mew=1.4, ms=6, zorder=4)
        axes.annotate(f"{label} {x:.3g}", (x, top), xytext=(7, -14), textcoords="offset points", size=9, color=colour)


def _plot_parts(result: Mapping[str, Any]) -> Any:
    """Bars of the parts: calls of several node counts, and below the rest of a step."""
    calls, loop = result["parts"], result["loop"]
    if not calls and not loop:
        return None
    bars = [26 * len(calls), 26 * len(loop)]
    height = 190 + sum(bars) + (96 if calls and loop else 0)
    subtitle = f"after {result['settings']['batch_length']:,} tokens; {_model_and_machine(result)}"
    figure = _new_figure("Where the milliseconds go", subtitle, height)
    top = 122
    if calls:
        axes = figure.add_axes((84 / WIDTH, 1 - (top + bars[0]) / height, (WIDTH - 150) / WIDTH, bars[0] / height))
        names = [f"{row['nodes']} node{'' if row['nodes'] == 1 else 's'}" for row in calls]
        _draw_stacked_bars(axes, calls, names, list(calls[0]["parts"]), "of a network call")
        top += bars[0] + 118
    if loop:
        axes = figure.add_axes((84 / WIDTH, 1 - (top + bars[1]) / height, (WIDTH - 150) / WIDTH, bars[1] / height))
        names = ["greedy" if row["temperature"] == 0 else f"at {row['temperature']}" for row in loop]
        network = " and ".join(f"{row['parts']['network call']:.3g}" for row in loop)
        title = f"of a step of {loop[0]['method']}, beside the call's own {network} ms"
        _draw_stacked_bars(axes, loop, names, list(PARTS_AROUND_CALL), title)
    return figure


def _draw_stacked_bars(
    axes: Any, rows: Sequence[Mapping[str, Any]], names: Sequence[str], parts: Sequence[str], title: str
) -> None:
    """Stacked bars with a legend above and their sums at their ends."""
    from matplotlib.patches import Patch

    wide = max(sum(max(row["parts"][part], 0) for part in parts) for row in rows) or 1
    axes.set_xlim(0, wide)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    for line, row in enumerate(rows):
        left = 0.0
        for part in parts:
            value = max(row["parts"][part], 0)
            axes.barh(line, value, left=left, height=0.72, color=PART_COLOURS[part], edgecolor=BACKGROUND, lw=0.8)
            if value > 0.075 * wide:
                axes.text(left + value / 2, line, f"{value:.3g}", ha="center", va="center", size=8.5,
                          color=BACKGROUND if PART_COLOURS[part] in DARK_COLOURS else INK)  # fmt: skip
            left += value
        axes.annotate(f"{sum(row['parts'][part] for part in parts):.3g}", (left, line), xytext=(5, 0),
                      textcoords="offset points", va="center", size=9, weight="bold")  # fmt: skip
    axes.set_yticks(range(len(rows)), names)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_xlabel("ms")
    axes.spines["left"].set_visible(False)
    axes.annotate(title, (0, 1), xycoords="axes fraction", xytext=(-48, 22), textcoords="offset points", size=9.5,
                  weight="bold", color=INK)  # fmt: skip
    handles = [Patch(color=PART_COLOURS[part], label=part) for part in parts]
    axes.legend(
        handles=handles, ncol=len(parts), loc="lower left", bbox_to_anchor=(-70 / (WIDTH - 150), 1), frameon=False,
        fontsize=8.5, handlelength=0.9, handleheight=0.9, handletextpad=0.45, columnspacing=0.9, borderaxespad=0.3,
        borderpad=0, labelcolor=MUTED,
    )  # fmt: skip
