"""Plot a benchmark run: speed-ups, tokens and cost of calls, acceptance, and an answer coloured by its calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from saltus.evaluation.reports.label_placement import place_labels
from saltus.evaluation.reports.palette import ALARM, BACKGROUND, BAND, INK, LINE, MUTED, Colour, assign_colours
from saltus.evaluation.reports.reliability_figure import draw_reliability
from saltus.evaluation.reports.text_figure import draw_coloured_text

FIGURES = ("speed-up", "calls", "acceptance", "calibration", "text")
FORMATS = ("svg", "pdf", "png")
WIDTH, NARROW_WIDTH = 720, 620  # pixels, a hundred an inch
SAME = 0.02  # of the highest share
DASH = 4  # length of a dash, in widths of the line
NOTE_LENGTH = 85  # letters of the systems of a note that fit a figure's width
STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "saltus", "pdf.fonttype": 42, "text.parse_math": False, "font.size": 10,
    "font.family": "sans-serif", "font.sans-serif": ["Helvetica Neue", "Arial", "DejaVu Sans"], "text.color": INK,
    "axes.edgecolor": LINE, "axes.labelcolor": MUTED, "axes.labelsize": 9.5, "axes.linewidth": 0.8,
    "axes.spines.top": False, "axes.spines.right": False, "xtick.color": MUTED, "ytick.color": MUTED,
    "xtick.labelsize": 9, "ytick.labelsize": 9,
    "xtick.major.size": 0, "ytick.major.size": 0, "figure.facecolor": BACKGROUND, "axes.facecolor": BACKGROUND,
}  # fmt: skip


def write_figures(results: Mapping[str, Any], records: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Write every figure that the run has data for. The files' paths."""
    return save_figures(draw_figures(results, records), folder)


def save_figures(drawn: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write figures by name, each as SVG, as PDF, and as PNG of twice the pixels. The files' paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in drawn.items():
        for kind in FORMATS:
            paths.append(folder / f"{name}.{kind}")
            paths[-1].write_bytes(render(figure, kind))
    return paths


def draw_figures(results: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The matplotlib figures by name, without those that the run has no data for."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        drawn = [
            _plot_speedup(results), _plot_calls(results), _plot_acceptance(results),
            draw_reliability(results, NARROW_WIDTH), draw_coloured_text(results, records, WIDTH),
        ]  # fmt: skip
    return {name: figure for name, figure in zip(FIGURES, drawn, strict=True) if figure is not None}


def render(figure: Any, kind: str) -> bytes:
    """A figure as "svg", "pdf" or "png", the same bytes whenever it is drawn."""
    import logging
    import warnings

    import matplotlib

    file = BytesIO()
    dated = {"svg": ("Date", "Creator", "Format", "Type"), "pdf": ("CreationDate", "Creator", "Producer")}
    metadata = dict.fromkeys(dated[kind]) if kind in dated else None
    fonts = logging.getLogger("matplotlib.font_manager")
    level = fonts.level
    fonts.setLevel(logging.ERROR)  # characters that the font lacks are left out of PNG and PDF
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(file, format=kind, dpi=200, metadata=metadata)
    fonts.setLevel(level)
    return file.getvalue()


def titled_figure(width: int, height: float | int, title: str, subtitle: str) -> Any:
    """A figure of so many pixels with two lines at its top."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 100, height / 100))
    figure.text(14 / width, 1 - 12 / height, title, size=12.5, weight="bold", va="top")
    figure.text(14 / width, 1 - 35 / height, subtitle, size=9, color=MUTED, va="top")
    return figure


def _new_figure(
    width: int,
    height: float | int,
    title: str,
    subtitle: str,
    left_margin: float | int,
    right_margin: int,
    bottom_margin: int = 49,
) -> tuple[Any, Any]:
    """A figure of so many pixels and its axes, 76 pixels below the top; left, right and under are their margins."""
    figure = titled_figure(width, height, title, subtitle)
    inner = width - left_margin - right_margin, height - 76 - bottom_margin
    return figure, figure.add_axes((left_margin / width, bottom_margin / height, inner[0] / width, inner[1] / height))


def _plot_speedup(results: Mapping[str, Any]) -> Any:
    """Dots with intervals: one row for each system over all texts; below, one for each category."""
    shown = {
        system: row for system, row in results["methods"].items() if system != "plain" and row["speedup"] is not None
    }
    if not shown:
        return None
    paint = assign_colours(results["methods"])
    categories = list(dict.fromkeys(name for row in results["methods"].values() for name in row["by_category"]))
    categories = categories if len(categories) > 1 else []
    pitch, gap = max(7.5, 11 - len(shown) / 2), 12
    height = 22 * len(shown) + 14 + len(categories) * (pitch * len(shown) + gap)
    names = max(_bold_width(_abbreviate(name)) for name in [*shown, *categories])
    figure, axes = _new_figure(
        WIDTH, height + 125, "Speed-up over plain decoding",
        "tokens per second relative to plain decoding in the same run, prefill included;"
        f" lines: 95 % intervals of {max(row['tasks'] for row in shown.values())} tasks",
        max(120, names + 28), 152,
    )  # fmt: skip
    axes.set_ylim(height, -5)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.axvline(1, color=paint.get("plain", paint[next(iter(shown))]).light, lw=1.4, zorder=1)
    for number, (system, row) in enumerate(shown.items()):
        y = 11 + 22 * number
        _draw_speedup(axes, row, y, paint[system], row["kind"], 7)
        axes.annotate(_abbreviate(system), (0, y), xycoords=("axes fraction", "data"), xytext=(-10, 0),
                      textcoords="offset points", ha="right", va="center", weight="bold",
                      color=paint[system].light)  # fmt: skip
        label = f"{row['speedup']:.2f} ×{_format_interval(row['ci95'].get('speedup'))}"
        axes.annotate(label, (1, y), xycoords=("axes fraction", "data"), xytext=(8, 0), textcoords="offset points",
                      va="center", size=8.5)  # fmt: skip
    top = 22 * len(shown) + 14
    for number, category in enumerate(categories):
        start = top + number * (pitch * len(shown) + gap)
        if number % 2 == 0:
            axes.axhspan(start, start + pitch * len(shown) + gap, color=BAND, lw=0, zorder=0)
        middle = start + (pitch * len(shown) + gap) / 2
        axes.annotate(_abbreviate(category), (0, middle), xycoords=("axes fraction", "data"), xytext=(-10, 0),
                      textcoords="offset points", ha="right", va="center", size=9.5)  # fmt: skip
        for line, (system, row) in enumerate(shown.items()):
            if part := row["by_category"].get(category):
                _draw_speedup(axes, part, start + gap / 2 + pitch * (line + 0.5), paint[system], row["kind"], 4.6)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.9), max(high, 1.1))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} ×")
    axes.grid(axis="x", color=LINE, lw=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.annotate("plain", (1, 1), xycoords=("data", "axes fraction"), xytext=(0, 2), textcoords="offset points",
                  ha="center", size=8.5, color=MUTED)  # fmt: skip
    axes.annotate("all texts", (0, 1), xycoords="axes fraction", xytext=(-10, 2), textcoords="offset points",
                  ha="right", size=8.5, color=MUTED)  # fmt: skip
    _draw_problem_notes(figure, results, height + 125)
    return figure


def _bold_width(text: str) -> float:
    """The pixels of a bold text of ten points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    return TextPath((0, 0), text, size=10, prop=FontProperties(weight="bold")).get_extents().width * 100 / 72


def _draw_speedup(
    axes: Any, row: Mapping[str, Any], y: float | int, colour: Colour, kind: str, size: float | int
) -> None:
    """A speed-up and its interval; a baseline's mark is hollow."""
    if row["speedup"] is None:
        return
    if bounds := row["ci95"].get("speedup"):
        axes.plot(bounds, [y, y], color=colour.light, lw=size / 3.2, solid_capstyle="round", zorder=2, alpha=0.55)
    face = BACKGROUND if kind == "baseline" else colour.light
    axes.plot([row["speedup"]], [y], colour.marker, color=colour.light, mfc=face, ms=size, mew=1.3, zorder=3)


def _abbreviate(name: str) -> str:
    """A name of at most 28 characters: of a varied option the field and the end of its value, such as a file's name."""
    short = re.sub(r" \w+\.(\w+)=(?:\S*/)?", r" \1=", name)
    return short if len(short) <= 28 else f"{short[:12]}…{short[-15:]}"


def _format_interval(bounds: Sequence[float | int] | None) -> str:
    return f"  [{bounds[0]:.2f}, {bounds[1]:.2f}]" if bounds else ""


def _draw_problem_notes(figure: Any, results: Mapping[str, Any], height: float | int) -> None:
    """Notes below: systems with problems, or with texts other than plain's (no fault of a baseline)."""
    ours, baselines, problems = [], [], []
    for system, row in results["methods"].items():
        if row["identical"] is not None and row["identical"] < row["texts"]:
            notes = ours if row["kind"] == "method" else baselines
            notes.append(f"{_abbreviate(system)} {row['texts'] - row['identical']} of {row['texts']}")
        if row["problems"]:
            problems.append(f"{_abbreviate(system)} {len(row['problems'])}")
    lines = [("other texts than plain’s: ", baselines, MUTED), ("other texts than plain’s: ", ours, ALARM),
             ("problems: ", problems, ALARM)]  # fmt: skip
    for number, (what, notes, colour) in enumerate(line for line in lines if line[1]):
        count = next((n for n in (3, 2) if len(", ".join(notes[:n])) <= NOTE_LENGTH), 1)
        more = f", and {len(notes) - count} more" if len(notes) > count else ""
        text = what + ", ".join(notes[:count]) + more
        figure.text(14 / WIDTH, (6 + 13 * number) / height, text, size=8, color=colour)


def _plot_calls(results: Mapping[str, Any]) -> Any:
    """Tokens per call against the cost of a call, with lines of equal speed."""
    shown = {system: row for system, row in results["methods"].items() if row["decode_tokens_per_call"]}
    if not shown:
        return None
    paint = assign_colours(results["methods"])
    silent = [system for system in results["methods"] if system not in shown]
    subtitle = "prefill apart; lines through the points: 95 % intervals; lines across: equal speed"
    figure, axes = _new_figure(
        NARROW_WIDTH, 450, "What a call brings, and what it costs", subtitle, 56, 156, 62 if silent else 49
    )  # fmt: skip
    if silent:
        names = ", ".join(map(_abbreviate, silent[:3])) + (" …" if len(silent) > 3 else "")
        figure.text(14 / NARROW_WIDTH, 7 / 450, f"not reported by {names}", size=8.5, color=MUTED)
    bars = []
    for system, row in shown.items():
        x, y, colour = row["ms_per_call"], row["decode_tokens_per_call"], paint[system]
        for name, line in (
            ("ms_per_call", lambda b, y=y: (b, [y, y])),
            ("decode_tokens_per_call", lambda b, x=x: ([x, x], b)),
        ):
            if bounds := row["ci95"].get(name):
                bars += axes.plot(*line(bounds), color=colour.light, lw=2, alpha=0.5, solid_capstyle="round", zorder=3)
        face = BACKGROUND if row["kind"] == "baseline" else colour.light
        axes.plot([x], [y], colour.marker, color=colour.light, mfc=face, ms=8, mew=1.5, zorder=4)
    low, high = axes.get_xlim()
    axes.set_xlim(max(0, low - 0.12 * (high - low)), high + 0.2 * (high - low))
    low, high = axes.get_ylim()
    axes.set_ylim(max(0, low - 0.12 * (high - low)), high + 0.14 * max(high - low, 0.2))
    bars += _draw_equal_speed_lines(axes, shown.get("plain"))
    points = {
        _abbreviate(system): [(row["ms_per_call"], row["decode_tokens_per_call"])] for system, row in shown.items()
    }
    place_labels(axes, points, {_abbreviate(system): paint[system].light for system in shown}, bars)
    axes.set_xlabel("milliseconds per call", loc="right")
    axes.set_ylabel("tokens per call")
    return figure


def _draw_equal_speed_lines(axes: Any, plain: Mapping[str, Any] | None) -> list[Any]:
    """Rays of equal tokens per second, labelled where they leave the axes; plain's is stronger, faster is shaded."""
    from matplotlib.ticker import MaxNLocator

    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    slowest, fastest = 1000 * low / right, 1000 * high / max(left, 1e-9)
    plain_speed = 1000 * plain["decode_tokens_per_call"] / plain["ms_per_call"] if plain else None
    reach = 1000 * high / right  # the ray that leaves through the corner
    rounded = MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]).tick_values(slowest, min(fastest, 3.2 * reach))
    speeds = [speed for speed in rounded if slowest < speed < fastest]
    taken: list[tuple[float, float, float]] = []  # where labels are, and half of their widths
    strong: list[Any] = []
    for speed in ([plain_speed] if plain_speed else []) + speeds:
        x = min(right, 1000 * high / speed)
        y = speed * x / 1000
        place = ((x - left) / (right - left), (y - low) / (high - low))
        mine = speed == plain_speed
        label = f"plain: {speed:.0f} tokens/s" if mine else f"{speed:g} tokens/s" if len(taken) < 2 else f"{speed:g}"
        half = max(0.06, 0.01 * len(label))
        if place[0] < 0.04 or any(
            abs(place[0] - x_taken) < half + half_taken and abs(place[1] - y_taken) < 0.06
            for x_taken, y_taken, half_taken in taken
        ):
            continue
        taken.append((*place, half))
        ray = axes.plot([0, x], [0, y], color=MUTED if mine else LINE, lw=1.8 if mine else 0.9, zorder=2 if mine else 1,
                        scalex=False, scaley=False)  # fmt: skip
        strong += ray if mine else []
        outside = x >= right
        axes.annotate(label, (x, y), xytext=(5, 0) if outside else (0, 3), textcoords="offset points", size=8.5,
                      ha="left" if outside else "center", va="center" if outside else "bottom",
                      color=INK if mine else MUTED, weight="bold" if mine else "normal")  # fmt: skip
    if plain_speed:
        xs = [0, right]
        line, top = [plain_speed * x / 1000 for x in xs], [max(high, plain_speed * right / 1000)] * 2
        axes.fill_between(xs, line, top, color=BAND, lw=0, zorder=0)
        axes.annotate("faster than plain", (0.015, 0.975), xycoords="axes fraction", va="top", size=9, color=MUTED,
                      style="italic")  # fmt: skip
    axes.set_xlim(left, right)
    axes.set_ylim(low, high)
    return strong


def _plot_acceptance(results: Mapping[str, Any]) -> Any:
    """Lines over the position in the draft, named at their ends; those on each other have dashes and marks in turn."""
    shown = {system: row["acceptance_by_position"] for system, row in results["methods"].items()}
    shown = {system: shares for system, shares in shown.items() if shares}
    if not shown:
        return None
    paint = assign_colours(results["methods"])
    subtitle = "share of the calls with drafts in which the k-th drafted token was accepted"
    figure, axes = _new_figure(NARROW_WIDTH, 350, "How far drafts hold", subtitle, 56, 16)
    drawn = []
    turns = _turns(list(shown.values()))
    for (system, shares), (turn, count) in zip(shown.items(), turns, strict=True):
        colour, places = paint[system], list(range(1, len(shares) + 1))
        dashes = (turn * DASH, (DASH, (count - 1) * DASH)) if turn else "solid"  # each shows between those on it
        drawn += axes.plot(
            places, shares, color=colour.light, lw=2, ls=dashes, dash_capstyle="butt", marker=colour.marker,
            markevery=(turn % len(shares), count), ms=5, mec=BACKGROUND, mew=0.8,
        )  # fmt: skip
    axes.set_xlim(0.7, max(3, *map(len, shown.values())) + 0.3)
    axes.set_ylim(0, 1.1 * max(max(shares) for shares in shown.values()) or 1)
    points = {_abbreviate(system): list(enumerate(shares, start=1)) for system, shares in shown.items()}
    place_labels(axes, points, {_abbreviate(system): paint[system].light for system in shown}, drawn)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.grid(axis="y", color=LINE, lw=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("position in the draft, k", loc="right")
    return figure


def _turns(curves: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Which each curve is of those that lie on each other, everywhere within SAME of the highest share, and of how many
    it is one.
    """
    most = max(map(max, curves))

    def is_on(one: Sequence[float], other: Sequence[float]) -> bool:
        return all(abs(share - of_other) <= SAME * most for share, of_other in zip(one, other, strict=False))

    groups: list[list[int]] = []
    for number, curve in enumerate(curves):
        group = next((group for group in groups if is_on(curve, curves[group[0]])), None)
        if group is None:
            groups.append([number])
        else:
            group.append(number)
    found = {number: (turn, len(group)) for group in groups for turn, number in enumerate(group)}
    return [found[number] for number in range(len(curves))]
