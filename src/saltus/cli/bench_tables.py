"""Show the results of a benchmark: a line a side, then the speed-ups by category."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from saltus.cli.painting import terminal


def show(results: Mapping[str, Any]) -> None:
    """Both tables, and what is wrong, on stdout."""
    console = terminal(soft_wrap=False)
    model, suite = results["model"], results["suite"]
    console.print(Text(f"{model['name']} ({model['dtype']}) on {suite['name']}: {_tasks(suite)}", "bold"))
    console.print(_sides(results["methods"], console.width >= 100))
    if len(next(iter(results["methods"].values()))["by_category"]) > 1:
        console.print(Text("\nspeed-up by category", "bold"))
        for table in _categories(results["methods"], console.width):
            console.print(table)
    _problems(console, results["methods"])


def _tasks(suite: Mapping[str, Any]) -> str:
    turns = f", {suite['turns']} turns" if suite["turns"] != suite["tasks"] else ""
    return f"{suite['tasks']} tasks{turns}"


def _sides(sides: Mapping[str, Any], wide: bool) -> Table:
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    table.add_column("", style="bold cyan", overflow="fold")
    graded = next((side["accuracy_of"] for side in sides.values() if side["accuracy_of"]), None)
    columns = {
        "tokens\na second": lambda side: _number(side["tokens_per_second"], 1),
        "speed-up\n(95 %)": _speedup,
        "prefill\napart": lambda side: _number(side["decode_speedup"]) if wide else None,
        "tokens\na call": lambda side: _number(side["tokens_per_call"]),
        "ms\na call": lambda side: _number(side["ms_per_call"], 1),
        "same\ntext": _same,
        (graded or ""): lambda side: _percent(side["accuracy"]) if graded else None,
    }
    plain = next(iter(sides.values()))
    shown = {name: cell for name, cell in columns.items() if cell(plain) is not None}
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for name, side in sides.items():
        table.add_row(name if len(name) < 20 else "\n".join(_parts(name)), *(cell(side) for cell in shown.values()))
    return table


def _speedup(side: Mapping[str, Any]) -> str:
    low, high = side["ci95"]["speedup"] or (float("nan"), float("nan"))
    return f"{_number(side['speedup'])} ×" + (f" ({low:.2f}–{high:.2f})" if high > low else "")


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _same(side: Mapping[str, Any]) -> Text:
    if side["identical"] is None:
        return Text("other dice", "dim")
    whole = side["identical"] == side["texts"]
    return Text(
        f"{side['identical']} of {side['texts']}", "green" if whole else "red" if side["kind"] == "method" else ""
    )


def _categories(sides: Mapping[str, Any], width: int) -> Iterator[Table]:
    """As many sides beside each other as there is room for, then the next ones below."""
    others = [name for name in sides if name != "plain"]
    categories = sides["plain"]["by_category"]
    room = width - max(map(len, categories)) - 8
    while others:
        table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
        table.add_column("", no_wrap=True)
        table.add_column("texts", justify="right")
        shown, left = [], room
        while others and (not shown or left > max(map(len, _parts(others[0])))):
            shown.append(others.pop(0))
            table.add_column("\n".join(_parts(shown[-1])), justify="right", no_wrap=True)
            left -= max(map(len, _parts(shown[-1]))) + 3
        for category, plain in categories.items():
            row = (_number(sides[name]["by_category"][category]["speedup"]) for name in shown)
            table.add_row(category, str(plain["texts"]), *row)
        yield table


def _parts(name: str) -> list[str]:
    """A name in lines: what is joined by + and -, each with its sign."""
    return re.findall(r"[^-+]+[-+]?", name)


def _problems(console: Console, sides: Mapping[str, Any], most: int = 5) -> None:
    for name, side in sides.items():
        for problem in side["problems"][:most]:
            console.print(Text(f"{name}: {problem}", "red"))
        if len(side["problems"]) > most:
            console.print(Text(f"{name}: … and {len(side['problems']) - most} more problems", "red"))


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
