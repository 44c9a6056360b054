"""Draw an answer in colours that show which tokens one call decided together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.cells import cell_len

from saltus.evaluation.reports.aggregation import text_id
from saltus.evaluation.reports.palette import INK, LINE, MUTED, assign_colours

TINTS = ("#bfe0f7", "#ffd9b8", "#bdebd8", "#f0cfe6", "#f3e3a8")  # neighbours differ also for the colour-blind
FAINT = ("#e9f4fb", "#fff2e6", "#e7f7f1", "#faf0f7", "#fbf6e1")  # of calls that decided one token
STRONG = ("#0072b2", "#c94c00", "#00805e", "#a8488c", "#8f6600")  # the lines under runs, and the squares
MAX_COLUMNS, MAX_LINES = 64, 24
CONTROL_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) != "\n"} | {127: 0x2421}


def most_tokens_per_call(results: Mapping[str, Any]) -> str | None:
    """The system with most tokens per call, except plain."""
    systems = results["methods"]
    able = {
        system: row["tokens_per_call"]
        for system, row in systems.items()
        if row["tokens_per_call"] and system != "plain"
    }
    return max(able, key=lambda system: able[system]) if able else None


def typical_record(
    results: Mapping[str, Any], records: Sequence[Mapping[str, Any]], system: str | None
) -> Mapping[str, Any] | None:
    """The record to show for a system: the one nearest to its mean tokens per call, except short texts."""
    candidates = [record for record in records if record["system"] == system and record["calls"]]
    if system is None or not candidates:
        return None
    mean = results["methods"][system]["tokens_per_call"]
    long = sorted(len(record["tokens"]) for record in candidates)[len(candidates) // 2]
    candidates = [record for record in candidates if len(record["tokens"]) >= long]
    return min(candidates, key=lambda record: abs(len(record["tokens"]) / len(record["calls"]) - mean))


def draw_coloured_text(results: Mapping[str, Any], records: Sequence[Mapping[str, Any]], width: int) -> Any:
    """A typical answer of the system with most tokens per call, and its number of calls; width in pixels."""
    record = typical_record(results, records, most_tokens_per_call(results))
    if record is None:
        return None
    from matplotlib.figure import Figure

    plain = [other for other in records if other["system"] == "plain" and text_id(other) == text_id(record)]
    calls = len(plain[-1]["calls"]) if plain and plain[-1]["calls"] else None
    lines = list(wrap_pieces(record["pieces"], MAX_COLUMNS))
    cut = len(lines) > MAX_LINES
    lines = lines[:MAX_LINES]
    counts = [count for count in (calls, len(record["calls"])) if count]
    high = max(86 + 17 * len(lines), 54 + sum(_squares_height(count) + 22 for count in counts))
    figure = Figure(figsize=(width / 100, high / 100))
    axes = figure.add_axes((0, 0, 1, 1))  # in pixels, from the top left
    axes.set_xlim(0, width)
    axes.set_ylim(high, 0)
    axes.axis("off")
    tokens, num_calls = len(record["tokens"]), len(record["calls"])
    axes.text(14, 12, f"{record['system']}: {tokens} tokens in {num_calls} calls", size=12.5, weight="bold", va="top")
    subtitle = f"every colour is one call; underlined where it decided several tokens · task {record['task']}"
    subtitle += f", {record['category']}" + (", the beginning" if cut else "")
    axes.text(14, 35, subtitle, size=9, color=MUTED, va="top")
    decided = [call["decided"] for call in record["calls"]]
    for row, line in enumerate(lines):
        _draw_line(axes, line, 76 + 17 * row, decided)
    _draw_call_counts(axes, record["system"], num_calls, calls, assign_colours(results["methods"]))
    return figure


def wrap_pieces(pieces: Sequence[str], max_columns: int) -> Iterator[list[tuple[str, int]]]:
    """Lines of at most so many columns, broken between words, as (character, index of its piece)."""
    marked = [(character, number) for number, piece in enumerate(pieces) for character in _printable(piece)]
    line: list[tuple[str, int]] = []
    for match in re.finditer(r"\n|[^\S\n]+|\S+", "".join(character for character, _ in marked)):
        word = marked[match.start() : match.end()]
        if match.group() == "\n":
            yield line
            line = []
            continue
        if not match.group().isspace() and line and _display_width(line) + _display_width(word) > max_columns:
            while line and line[-1][0].isspace():
                line.pop()
            yield line
            line = []
        for letter in word:
            if _display_width(line) >= max_columns and letter[0] != " ":
                yield line
                line = []
            if _display_width(line) < max_columns:
                line.append(letter)
    if line:
        yield line


def _printable(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\t", "    ").translate(CONTROL_PICTURES)


def _display_width(characters: Sequence[tuple[str, int]]) -> int:
    """Cells that a terminal would take."""
    return cell_len("".join(character for character, _ in characters))


def _draw_line(axes: Any, line: list[tuple[str, int]], y: float | int, decided: Sequence[int]) -> None:
    from matplotlib.patches import Rectangle

    cell, x = 7.1, 14.0
    for number, group in groupby(line, key=lambda letter: letter[1]):
        letters = list(group)
        several = number < len(decided) and decided[number] > 1
        wide, which = cell * _display_width(letters), number % len(TINTS)
        axes.add_patch(Rectangle((x, y - 7.5), wide, 15, fc=(TINTS if several else FAINT)[which], lw=0))
        if several:
            axes.plot([x + 0.8, x + wide - 0.8], [y + 7.2, y + 7.2], color=STRONG[which], lw=1.3, solid_capstyle="butt")
        text = "".join(letter for letter, _ in letters)
        lead = len(text) - len(text.lstrip(" "))
        if text.strip(" "):
            axes.text(x + cell * lead, y + 4, text.strip(" "), family="monospace", size=8.49, color=INK)
        x += wide


SQUARES_PER_ROW, SQUARE_SIZE = 18, 9.4


def _squares_height(calls: int) -> float:
    return 22 + SQUARE_SIZE * -(-min(calls, 10 * SQUARES_PER_ROW) // SQUARES_PER_ROW)


def _draw_call_counts(
    axes: Any, system: str, num_calls: int, num_plain_calls: int | None, paint: Mapping[str, Any]
) -> None:
    """Beside the text: a square for each call of plain decoding, and of the system."""
    from matplotlib.patches import Rectangle

    x, y = 14 + 7.1 * MAX_COLUMNS + 34, 72.0
    for name, calls in (("plain", num_plain_calls), (system, num_calls)):
        if calls is None:
            continue
        axes.text(x, y, f"{name}: {calls} calls", size=10, weight="bold", color=paint[name].light, va="center")
        shown = min(calls, 10 * SQUARES_PER_ROW)
        for number in range(shown):
            corner = x + SQUARE_SIZE * (number % SQUARES_PER_ROW), y + 12 + SQUARE_SIZE * (number // SQUARES_PER_ROW)
            colour = paint["plain"].light if name == "plain" else STRONG[number % len(STRONG)]
            axes.add_patch(Rectangle(corner, SQUARE_SIZE - 2, SQUARE_SIZE - 2, fc=colour, lw=0))
        y += _squares_height(calls) + 22
        if calls > shown:
            axes.text(x, y - 22, f"and {calls - shown} more", size=8, color=MUTED, va="center")
    axes.plot([x - 17, x - 17], [66, y - 20], color=LINE, lw=0.8)
