"""Print benchmark results: one row for each system, then speed-ups by category."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from saltus.cli.coloured_text import new_table, terminal
from saltus.cli.report import number_of
from saltus.evaluation.reports.drafters import DRAFTERS_NOTE, each_drafter
from saltus.evaluation.reports.markdown import DRAFTER_COLUMNS, drafter_cells, format_number

MAX_LISTED = 5  # tasks that were skipped, and problems of a system


def print_tables(results: Mapping[str, Any]) -> None:
    """Print both tables, skipped tasks and problems."""
    console = terminal(soft_wrap=False)
    model, suite = results["model"], results["suite"]
    console.print(
        Text(f"{model['name']} ({model.get('weights', model['dtype'])}) on {suite['name']}: {_tasks(results)}", "bold")
    )
    console.print(_systems_table(results["methods"], console.width >= 100))
    for note in results.get("notes", ()):
        console.print(Text(note, "yellow"))
    if rows := list(each_drafter(results)):
        console.print(Text("\nby drafter", "bold"))
        console.print(_drafters_table(rows))
        console.print(Text(DRAFTERS_NOTE, "dim"))
    if len(next(iter(results["methods"].values()))["by_category"]) > 1:
        console.print(Text("\nspeed-up by category", "bold"))
        for table in _category_tables(results["methods"], console.width):
            console.print(table)
    _print_skipped(console, results.get("skipped", ()))
    _print_problems(console, results["methods"])


def _tasks(results: Mapping[str, Any]) -> str:
    suite, seeds = results["suite"], results["settings"].get("seeds", 1)
    turns = f", {suite['turns']} turns" if suite["turns"] != suite["tasks"] else ""
    return f"{number_of(suite['tasks'], 'task')}{turns}" + (f", {seeds} seeds" if seeds > 1 else "")


def _systems_table(systems: Mapping[str, Any], wide: bool) -> Table:
    table = new_table()
    table.add_column("", style="bold cyan", overflow="fold")
    graded = next((system["accuracy_of"] for system in systems.values() if system["accuracy_of"]), None)
    cells = {
        "tokens\na second": lambda system: format_number(system["tokens_per_second"], 1),
        "speed-up\n(95 %)": _speedup,
        "prefill\napart": lambda system: format_number(system["decode_speedup"]) if wide else None,
        "tokens\na call": lambda system: format_number(system["tokens_per_call"]),
        "ms\na call": lambda system: format_number(system["ms_per_call"], 1) if wide or not graded else None,
        "same\ntext": _same_text,
        (graded or ""): lambda system: _percent(system["accuracy"]) if graded else None,
    }
    plain = next(iter(systems.values()))
    shown = {name: cell for name, cell in cells.items() if cell(plain) is not None}
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for name, system in systems.items():
        table.add_row(_folded(name), *(cell(system) for cell in shown.values()))
    return table


def _speedup(system: Mapping[str, Any]) -> str:
    low, high = system["ci95"]["speedup"] or (float("nan"), float("nan"))
    return f"{format_number(system['speedup'])} ×" + (f" ({low:.2f}–{high:.2f})" if high > low else "")


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _same_text(system: Mapping[str, Any]) -> Text:
    if system["identical"] is None:
        return Text("other random numbers", "dim")
    whole = system["identical"] == system["texts"]
    return Text(
        f"{system['identical']} of {system['texts']}", "green" if whole else "red" if system["kind"] == "method" else ""
    )


def _drafters_table(rows: Sequence[tuple[str, str, Mapping[str, Any]]]) -> Table:
    """A row for each drafter, below the name of its system where that is another."""
    table = new_table()
    table.add_column("", style="bold cyan", overflow="fold")
    for name in DRAFTER_COLUMNS:
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    shown = ""
    for system, name, drafter in rows:
        if system != name and system != shown:
            table.add_row(_folded(system))
        shown = system
        table.add_row(name if system == name else f"  {name}", *drafter_cells(drafter), style="not bold")
    return table


def _category_tables(systems: Mapping[str, Any], width: int) -> Iterator[Table]:
    """Tables with as many systems as fit into the width, the others below."""
    others = [name for name in systems if name != "plain"]
    categories = systems["plain"]["by_category"]
    table_width = width - max(map(len, categories)) - 8
    while others:
        table = new_table()
        table.add_column("", no_wrap=True)
        table.add_column("texts", justify="right")
        shown, width_left = [], table_width
        while others and (not shown or width_left > max(map(len, _name_lines(others[0])))):
            shown.append(others.pop(0))
            table.add_column("\n".join(_name_lines(shown[-1])), justify="right", no_wrap=True)
            width_left -= max(map(len, _name_lines(shown[-1]))) + 3
        for category, plain in categories.items():
            row = (format_number(systems[name]["by_category"][category]["speedup"]) for name in shown)
            table.add_row(category, str(plain["texts"]), *row)
        yield table


def _folded(name: str) -> str:
    return name if len(name) < 20 else "\n".join(_name_lines(name))


def _name_lines(name: str) -> list[str]:
    """A name split at + and - into lines."""
    return re.findall(r"[^-+]+[-+]?", name)


def _print_skipped(console: Console, skipped: Sequence[str]) -> None:
    if skipped:
        console.print(Text(f"\n{number_of(len(skipped), 'task')} skipped for all systems:", "yellow"))
    for line in skipped[:MAX_LISTED]:
        console.print(Text(line, "yellow"))
    if len(skipped) > MAX_LISTED:
        console.print(Text(f"… and {number_of(len(skipped) - MAX_LISTED, 'more task')}", "yellow"))


def _print_problems(console: Console, systems: Mapping[str, Any]) -> None:
    for name, system in systems.items():
        for problem in system["problems"][:MAX_LISTED]:
            console.print(Text(f"{name}: {problem}", "red"))
        if len(system["problems"]) > MAX_LISTED:
            console.print(Text(f"{name}: … and {len(system['problems']) - MAX_LISTED} more problems", "red"))
