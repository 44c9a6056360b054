"""Show the verdicts of a run: as Markdown, and as one HTML page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from saltus.evaluation.benchmarks.benchmark_run import make_folder
from saltus.evaluation.reports.markdown import table_head, table_row

REPORTS = Path(__file__).parents[1] / "reports"


def render_markdown(report: Mapping[str, Any]) -> str:
    """The report for a repository or an issue."""
    return "\n".join(_markdown_lines(report)) + "\n"


def _markdown_lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"**{report['summary']}**"
    yield ""
    yield from table_head(["check", "verdict", ""])
    for verdict in report["verdicts"]:
        status = verdict["status"]
        shown = f"**{status}**" if status == "finding" else status
        yield table_row([verdict["check"], shown, verdict["line"]])
    yield ""
    for check, command in findings_to_repeat(report):
        yield f"A request of the finding {check}:\n\n```\n{command}\n```\n"
    for name, value in run_facts(report):
        yield f"- {name}: {value}"


def findings_to_repeat(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The names of findings, and commands that send one of their requests again."""
    for verdict in report["verdicts"]:
        if verdict["status"] == "finding":
            yield from ((verdict["check"], command) for command in verdict["repeat"])


def run_facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The facts about a run, in words."""
    for side in report.get("sides") or ():
        added = " ".join(part for part in (json.dumps(side["body"]) if side["body"] else "", *side["headers"]) if part)
        yield side["name"], f"{side['url']}, {side['model']}, {side['route']}{', with ' + added if added else ''}"
    for name, server in (report.get("servers") or {}).items():
        yield f"server {name}".strip(), f"{server['program']} {server['version']}".strip()
    if settings := report.get("settings"):
        yield "settings", ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)
    yield "command", str(report["command"])
    yield "date", f"{report['date']}, saltus {report['saltus']}"


def render_page(report: Mapping[str, Any]) -> str:
    """The page as one self-contained string, in the style of a benchmark's."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    return environment.get_template("page.html.jinja").render(
        report=report, style=Markup((REPORTS / "page.css").read_text(encoding="utf-8")), facts=list(run_facts(report))
    )


def write_report(report: Mapping[str, Any], folder: Path) -> None:
    """Write page.html, report.md and report.json. Errors: ValueError if the folder is a file."""
    make_folder(folder)
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(render_markdown(report), encoding="utf-8")
    (folder / "page.html").write_text(render_page(report), encoding="utf-8")
