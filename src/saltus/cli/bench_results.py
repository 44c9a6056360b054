"""Collect, write and remove the results of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def results_of(suite: str, records: Any) -> dict[str, Any]:
    """What results.json has, of the records of a suite."""
    from saltus.evaluation.benchmarks.suites import suite_label
    from saltus.evaluation.reports.aggregation import aggregate_records, few_tasks_note, list_skipped

    answers = records.answers
    tasks, turns = (
        {tuple(record[key] for key in keys) for record in answers} for keys in (("task",), ("task", "turn"))
    )
    return {
        **records.run_info,
        "suite": {"name": suite_label(suite), "tasks": len(tasks), "turns": len(turns)},
        "notes": [note for note in (few_tasks_note(len(tasks)),) if note],
        "skipped": list_skipped(records.skipped),
        "methods": aggregate_records(answers),
    }


def write_results(results: dict[str, Any], records: list[dict[str, Any]], folder: Path) -> None:
    """Write all files of a run; figures last, since matplotlib may be missing."""
    from json import dumps

    from saltus.cli.answers import print_note
    from saltus.evaluation.reports.markdown import render_markdown
    from saltus.evaluation.reports.spec_bench import spec_bench_answers

    (folder / "results.md").write_text(render_markdown(results), encoding="utf-8")
    (folder / "results.json").write_text(dumps(results, indent=1) + "\n", encoding="utf-8")
    if results["suite"]["name"].startswith("spec-bench"):
        (folder / "model_answer").mkdir(exist_ok=True)
        for system in results["methods"]:
            lines = "".join(
                dumps(answer) + "\n" for answer in spec_bench_answers(records, system, results["model"]["name"])
            )
            (folder / _answer_file(system)).write_text(lines, encoding="utf-8")
    try:
        from saltus.evaluation.reports.benchmark_plots import write_figures
        from saltus.evaluation.reports.page import render_page

        write_figures(results, records, folder)
        (folder / "page.html").write_text(render_page(results, records), encoding="utf-8")
    except ModuleNotFoundError:
        print_note(f'written: {folder / "results.json"}; for figures and the page: pip install ".[bench]" in the clone')
    else:
        print_note(f"written: {folder / 'page.html'}, results.json, records.jsonl and figures")


def _answer_file(system: str) -> str:
    name = system.replace("/", "-").replace(":", "-")
    return f"model_answer/{name}.jsonl"


def remove_results(folder: Path) -> None:
    """Remove the files that `write_results` has written there; systems and figures of the next run may be fewer."""
    from json import loads

    from saltus.evaluation.reports.benchmark_plots import FIGURES, FORMATS

    try:
        systems = list(loads((folder / "results.json").read_text(encoding="utf-8"))["methods"])
    except (OSError, ValueError, KeyError, TypeError):
        systems = []
    figures = [f"{name}.{kind}" for name in FIGURES for kind in FORMATS]
    for name in ("results.md", "results.json", "page.html", *figures, *map(_answer_file, systems)):
        (folder / name).unlink(missing_ok=True)


def has_problems(results: Mapping[str, Any]) -> bool:
    """True if a method's text differs from plain's where it must not, or has problems."""
    ours = [system for system in results["methods"].values() if system["kind"] == "method"]
    exact = results["settings"]["rule"] == "match" or results["settings"]["temperature"] == 0
    return any(system["problems"] or (exact and system["identical"] != system["texts"]) for system in ours)
