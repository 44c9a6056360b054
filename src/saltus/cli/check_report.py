"""Print the report of a check, write its page, and end with the exit code of its verdict."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

STYLES = {"finding": "bold red", "ok": "green", "note": "yellow", "figure": "", "not checked": "dim"}


def finish(report: Mapping[str, Any], json: bool, out: Path | None) -> None:
    """Show a report; exit code 1 if it has a finding."""
    if json:
        from saltus.cli.report import print_json

        print_json(report)
    else:
        _show(report)
    if out is not None:
        from saltus.cli.answers import print_note
        from saltus.evaluation.audit.report import write_report

        write_report(report, out)
        print_note(f"written: {out / 'page.html'}, report.md and report.json")
    if report["findings"]:
        raise typer.Exit(1)


def _show(report: Mapping[str, Any]) -> None:
    from rich.text import Text

    from saltus.cli.coloured_text import VISIBLE_CONTROL_CHARACTERS, new_table, terminal
    from saltus.evaluation.audit.report import findings_to_repeat

    console = terminal(soft_wrap=False)
    table = new_table()
    table.add_column("check")
    table.add_column("verdict", no_wrap=True)
    table.add_column("")
    for verdict in report["verdicts"]:
        style = STYLES[verdict["status"]]
        words = Text(verdict["line"], "dim" if style == "dim" else "")
        for example in verdict["examples"][:3] if verdict["status"] == "finding" else ():
            words.append(f"\n{example.translate(VISIBLE_CONTROL_CHARACTERS)}", "dim")
        table.add_row(verdict["check"], Text(verdict["status"], style), words)
    console.print(table)
    console.print()
    commands = list(findings_to_repeat(report))
    if commands:
        console.print("Send requests of these findings again:")
    for check, command in commands:
        console.print(Text(f"{check}:", "dim"))
        console.print(Text(command.translate(VISIBLE_CONTROL_CHARACTERS)), soft_wrap=True)
    if commands:
        console.print()
    console.print(Text(report["summary"], "bold red" if report["findings"] else "bold green"))
