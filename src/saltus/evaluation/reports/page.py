"""One HTML page for a benchmark run: a summary, figures, replayed answers beside plain decoding, and all numbers."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from saltus.evaluation.reports.aggregation import MIN_TASKS, SERVER_NOTE, few_tasks_categories, text_id
from saltus.evaluation.reports.drafters import DRAFTERS_NOTE, each_drafter
from saltus.evaluation.reports.markdown import DRAFTER_COLUMNS, PAIRS, cores_and_threads, drafter_cells
from saltus.evaluation.reports.palette import ALARM, BACKGROUND, BAND, COLOURS, INK, LINE, MUTED, PLAIN, assign_colours
from saltus.evaluation.reports.text_figure import typical_record

MAX_TASKS, MAX_BYTES = 30, 1_300_000  # shown at most; the page stays below two megabytes
MAX_QUESTION_LENGTH = 400  # characters of a question
TextId = tuple[str, int, int | None]  # as of `text_id`
CSS_VARIABLES = {INK: "ink", MUTED: "muted", LINE: "line", BAND: "band", BACKGROUND: "paper", ALARM: "alarm"}


@dataclass(frozen=True)
class Summary:
    """A run in a sentence, unwelcome findings included; the system that it is about, and a note beside it."""

    sentence: str
    system: str | None = None
    note: str = ""


def render_page(results: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    """The page as one self-contained string, with styles, figures and scripts.

    `results` and `records` are those of `saltus bench`, also of an interrupted run. Without matplotlib there are no
    figures.
    """
    here = Path(__file__).parent
    environment = Environment(loader=FileSystemLoader(here), autoescape=True, trim_blocks=True)
    environment.globals |= {"number": _number, "interval": _interval}
    systems = results["methods"]
    head = summarize_results(results) if records and systems else Summary("No text was finished before the run ended.")
    shown = _replay_data(results, records, head.system)
    script = (here / "page.js").read_text(encoding="utf-8")
    return environment.get_template("page.html.jinja").render(
        results=results,
        systems=systems,
        head=head,
        style=Markup((here / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        digest="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        paint=assign_colours(systems),
        palette=(PLAIN, *COLOURS),
        plots=_svg_plots(results, records),
        categories=list(dict.fromkeys(name for one in systems.values() for name in one["by_category"])),
        pairs=PAIRS,
        drafters=list(each_drafter(results)),
        drafter_columns=DRAFTER_COLUMNS,
        drafter_cells=drafter_cells,
        drafters_note=DRAFTERS_NOTE,
        data=_escape_json(shown),
        shown=len(shown["tasks"]),
        graded=any(one["accuracy"] is not None for one in systems.values()),
        facts=list(_run_facts(results)),
        few_tasks=", ".join(few_tasks_categories(systems)),
        min_tasks=MIN_TASKS,
        server_note=SERVER_NOTE if any(name.startswith("endpoint:") for name in systems) else "",
    )


def _number(value: float | int | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _interval(one: Mapping[str, Any], name: str, digits: int = 2) -> str:
    bounds = one["ci95"].get(name)
    return f"{bounds[0]:,.{digits}f} – {bounds[1]:,.{digits}f}" if bounds else ""


def _run_facts(results: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Facts about the run, as far as they are known."""
    model, machine = results.get("model") or {}, results.get("machine") or {}
    millions = f"{model['parameters'] / 1e6:,.0f} million parameters" if model.get("parameters") else None
    weights = model.get("weights") or model.get("dtype")
    memory = f"{machine['memory_gb']:g} GB" if machine.get("memory_gb") else None
    cores = cores_and_threads(machine) if machine.get("cores") else None
    names = ("python", "torch", "transformers", "saltus")
    versions = [f"{name} {machine[name]}" for name in names if machine.get(name)]
    versions += [f"{name} of {package}" for name, package in (results.get("packages") or {}).items()]
    suite = results.get("suite") or {}
    turns = f"{suite['tasks']} tasks, {suite['turns']} turns" if "turns" in suite else None
    settings = [f"{name} {value}" for name, value in (results.get("settings") or {}).items() if value is not None]
    for name, parts in (
        ("command", [results.get("command")]), ("date", [results.get("date")]), ("commit", [results.get("commit")]),
        ("model", [model.get("name"), weights, millions]), ("suite", [suite.get("name"), turns]),
        ("settings", settings), ("versions", versions),
        ("machine", [machine.get("processor"), machine.get("gpu"), cores, memory, machine.get("system")]),
    ):  # fmt: skip
        known = [str(part) for part in parts if part]
        if known:
            yield name, ", ".join(known)


def _svg_plots(results: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The figures as SVG for the page, without the coloured text, which the page shows itself."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return {}
    from saltus.evaluation.reports.benchmark_plots import draw_figures, render

    drawn = {name: figure for name, figure in draw_figures(results, records).items() if name != "text"}
    return {name: _inline_svg(render(figure, "svg").decode(), name) for name, figure in drawn.items()}


def _inline_svg(svg: str, name: str) -> str:
    """A standalone SVG adapted for a page with several: unique ids, the page's colours and fonts."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\1{name}-", svg)
    svg = re.sub(r"(font: [^;\"]*?)'[^;\"]*", r"\1var(--sans)", svg)
    roles = CSS_VARIABLES | {colour.light: f"side-{colour.name}" for colour in (PLAIN, *COLOURS)}
    svg = re.sub(r"#[0-9a-f]{6}\b", lambda found: f"var(--{roles[found[0]]})" if found[0] in roles else found[0], svg)
    return re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', svg, count=1)


def _replay_data(
    results: Mapping[str, Any], records: Sequence[Mapping[str, Any]], system: str | None
) -> dict[str, Any]:
    """The data of the replay: answers of some tasks of every category, with their calls; of several seeds the first."""
    systems = list(results["methods"])
    paint = assign_colours(systems)
    found: dict[TextId, dict[str, Any]] = {}
    for record in records:
        if record["system"] in systems and record.get("seed") == records[0].get("seed"):
            inputs = text_id(record)
            about = {
                "task": record["task"], "turn": record["turn"], "category": record["category"],
                "prompt": record.get("prompt", "")[:MAX_QUESTION_LENGTH], "by": {},
            }  # fmt: skip
            found.setdefault(inputs, about)["by"][systems.index(record["system"])] = _replay_record(record)
    tasks, size = [], 0
    for name in _tasks_across_categories(found):
        turns = [text for inputs, text in found.items() if inputs[0] == name]
        size += len(json.dumps(turns))
        if tasks and size > MAX_BYTES:
            break
        tasks.append((name, turns))
    order = {name: number for number, name in enumerate(dict.fromkeys(inputs[0] for inputs in found))}
    texts = [text for _, turns in sorted(tasks, key=lambda task: order[task[0]]) for text in turns]
    kept = [
        record for record in records if any(text_id(record) in found and record["task"] == name for name, _ in tasks)
    ]
    start = typical_record(results, kept, system)
    first = next((n for n, text in enumerate(texts) if start and (text["task"], text["turn"]) == text_id(start)[:2]), 0)
    named = [{"name": system, "colour": paint[system].name} for system in systems]
    return {"systems": named, "tasks": texts, "best": system or (systems[-1] if systems else None), "first": first}


def _tasks_across_categories(found: Mapping[TextId, Mapping[str, Any]]) -> list[str]:
    """The tasks to show: the first of each category, then the second, and so on."""
    by_category: dict[str, list[str]] = {}
    for (task, *_), text in found.items():
        own = by_category.setdefault(text["category"], [])
        if task not in own:
            own.append(task)
    ranked = [(rank, task) for own in by_category.values() for rank, task in enumerate(own)]
    return [task for _, task in sorted(ranked, key=lambda pair: pair[0])][:MAX_TASKS]


def _replay_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """An answer's pieces with tokens and nodes, and the time of each in milliseconds since the start.

    The time between calls is not recorded; it is spread evenly, so that the last piece comes when the text was done.
    """
    calls = record["calls"]
    whole = {
        "tokens": record["new_tokens"], "seconds": round(record["seconds"], 4), "problems": list(record["problems"]),
        "finish": record["finish_reason"],
    }  # fmt: skip
    if not calls:
        return whole | {"pieces": ["".join(record["pieces"])], "calls": None}
    pieces = [*record["pieces"], *[""] * len(calls)][: len(calls)]
    pieces[-1] += "".join(record["pieces"][len(calls) :])
    rest = max(0.0, record["seconds"] - sum(call["seconds"] for call in calls)) / len(calls)
    timed = [[call["decided"], call["nodes"], round(1000 * call["seconds"], 2)] for call in calls]
    return whole | {"pieces": pieces, "calls": timed, "rest": round(1000 * rest, 3)}


def _escape_json(data: Mapping[str, Any]) -> str:
    """JSON in which no text can begin or end an HTML tag."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "replace").decode()


def summarize_results(results: Mapping[str, Any]) -> Summary:
    """The fastest of our methods against plain decoding, or the fastest baseline if there is no method."""
    systems = results["methods"]
    compared = {system: row for system, row in systems.items() if system != "plain" and row["speedup"] is not None}
    ours = {system: row for system, row in compared.items() if row["kind"] == "method"}
    able = ours or compared
    if not able:
        return Summary("Nothing was compared with plain decoding.")
    best = max(able, key=lambda system: able[system]["speedup"])
    row = able[best]
    same = row["identical"] is not None and row["identical"] == row["texts"]
    low, high = row["ci95"].get("speedup") or (row["speedup"], row["speedup"])
    bounds = f" [{low:.2f}, {high:.2f}]" if row["ci95"].get("speedup") else ""
    texts = f"{row['texts']} text{'s' * (row['texts'] != 1)}"
    sentence = (
        f"{best} wrote {'the same ' if same else ''}{texts} {row['speedup']:.2f} × as fast as plain decoding{bounds}"
    )
    sentence += _caveats(row, low, high) + "."
    beside = f"The fastest of {len(able)} {'methods' if ours else 'baselines'}." if len(able) > 1 else ""
    return Summary(sentence, best, beside)


def _caveats(row: Mapping[str, Any], lower_bound: float | int, upper_bound: float | int) -> str:
    doubts = []
    if upper_bound < 1:
        doubts.append("which is slower")
    elif lower_bound <= 1:
        doubts.append("no clear difference")
    if row["identical"] is None:
        doubts.append("with other random numbers, so the texts are not compared")
    elif row["identical"] < row["texts"]:
        count = row["texts"] - row["identical"]
        doubts.append("but not one of them is plain's" if not row["identical"] else f"but {count} of them differ")
    if row["problems"]:
        count = len(row["problems"])
        doubts.append(f"and {count} problem{'s were' if count > 1 else ' was'} found")
    return "".join(f", {doubt}" for doubt in doubts)
