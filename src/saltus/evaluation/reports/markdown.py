"""The tables of a benchmark run in Markdown, with all that a reader must know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from saltus.evaluation.reports.aggregation import SERVER_NOTE
from saltus.evaluation.reports.drafters import DRAFTERS_NOTE, each_drafter

MAX_POSITIONS = 10  # of draft tokens, in the table of acceptance
PAIRS = {"speedup_over": "Tokens a second", "tokens_per_call_over": "Tokens a call"}  # by the entry of results.json
DRAFTER_COLUMNS = ("offered", "verified", "accepted", "accepted alone", "accepted share", "ECE")


def render_markdown(results: Mapping[str, Any]) -> str:
    """The run, all systems, one against the other, acceptance, drafters, categories, what is wrong, and the machine."""
    parts = (
        _run_description, _systems_table, _pairs_tables, _acceptance_table, _drafters_table, _categories_table,
        _skipped, _problems, _environment,
    )  # fmt: skip
    return "\n".join(line for part in parts for line in part(results)) + "\n"


def _run_description(results: Mapping[str, Any]) -> Iterator[str]:
    model, suite, settings = results["model"], results["suite"], results["settings"]
    sampled = "T = {temperature}, seed {seed}, coupling {coupling}".format_map(settings)
    times = f", {settings['seeds']} seeds" if "seeds" in settings else ""
    way = sampled if settings["temperature"] else "greedy"
    turns = f" ({suite['turns']} turns)" if suite["turns"] != suite["tasks"] else ""
    tasks = f"{suite['tasks']} tasks{turns}{times}"
    yield f"{model['name']} in {model['weights']} on {suite['name']}: {tasks}, {way}, at most"
    yield f"{settings['max_new_tokens']} new tokens, prefill included. In brackets: 95 % intervals."
    yield ""


def _systems_table(results: Mapping[str, Any]) -> Iterator[str]:
    systems = results["methods"]
    graded = next((system["accuracy_of"] for system in systems.values() if system["accuracy_of"]), None)
    head = ["", "tokens a second", "speed-up", "prefill apart", "tokens a call", "ms a call", "same text"]
    yield from table_head([*head, *([graded] if graded else [])])
    for name, system in systems.items():
        bounds = system["ci95"]["speedup"]
        certain = "" if name == "plain" or not bounds else f" [{bounds[0]:.2f}, {bounds[1]:.2f}]"
        same = "other random numbers" if system["identical"] is None else f"{system['identical']} of {system['texts']}"
        cells = [
            f"`{name}`", format_number(system["tokens_per_second"], 1),
            f"{format_number(system['speedup'])} ×{certain}",
            f"{format_number(system['decode_speedup'])} ×", format_number(system["tokens_per_call"]),
            format_number(system["ms_per_call"], 1), same,
        ]  # fmt: skip
        if graded:
            cells.append(format_number(None if system["accuracy"] is None else 100 * system["accuracy"], 1) + " %")
        yield table_row(cells)
    yield ""
    servers = [SERVER_NOTE] if any(name.startswith("endpoint:") for name in systems) else []
    for note in [*results.get("notes", ()), *servers]:
        yield note
        yield ""


def _pairs_tables(results: Mapping[str, Any]) -> Iterator[str]:
    systems = results["methods"]
    others = [name for name in systems if name != "plain"]
    for entry, what in PAIRS.items():
        shown = [name for name in others if any(pair["ratio"] for pair in systems[name][entry].values())]
        if len(shown) < 2:
            continue
        yield f"{what} of each row, divided by those of each column:"
        yield ""
        yield from table_head(["", *(f"`{name}`" for name in shown)])
        for name in shown:
            pairs = (systems[name][entry].get(other) for other in shown)
            yield table_row([f"`{name}`", *("" if pair is None else _ratio(pair) for pair in pairs)])
        yield ""


def _ratio(pair: Mapping[str, Any]) -> str:
    bounds = " [{:.2f}, {:.2f}]".format(*pair["ci95"]) if pair["ci95"] else ""
    return f"{format_number(pair['ratio'])} ×{bounds}"


def _acceptance_table(results: Mapping[str, Any]) -> Iterator[str]:
    shares = {name: system["acceptance_by_position"] or [] for name, system in results["methods"].items()}
    if not any(shares.values()):
        return
    positions = range(min(max(map(len, shares.values())), MAX_POSITIONS))
    yield "Of the calls that verified drafts, the share whose first k draft tokens were accepted, by k:"
    yield ""
    yield from table_head(["k", *(str(k + 1) for k in positions)])
    shares |= {
        f"{system}: {name}": drafter["acceptance_by_position"]
        for system, name, drafter in each_drafter(results)
        if len(results["methods"][system]["by_drafter"]) > 1
    }
    for name, own in shares.items():
        if own:
            yield table_row([f"`{name}`", *(format_number(own[k] if k < len(own) else 0.0) for k in positions)])
    yield ""


def _drafters_table(results: Mapping[str, Any]) -> Iterator[str]:
    rows = list(each_drafter(results))
    if not rows:
        return
    yield f"By drafter. {DRAFTERS_NOTE}"
    yield ""
    yield from table_head(["", "drafter", *DRAFTER_COLUMNS])
    for system, name, drafter in rows:
        yield table_row([f"`{system}`", name, *drafter_cells(drafter)])
    yield ""


def drafter_cells(drafter: Mapping[str, Any]) -> list[str]:
    """The cells of `DRAFTER_COLUMNS`: tokens a call, and of the verified tokens the share that was accepted."""
    per_call = (drafter[f"{name}_per_call"] for name in ("offered", "verified", "accepted", "accepted_alone"))
    share = drafter["accepted_share"]
    accepted = "–" if share is None else f"{100 * share:.0f} %"
    return [*map(format_number, per_call), accepted, format_number(drafter["expected_calibration_error"])]


def _categories_table(results: Mapping[str, Any]) -> Iterator[str]:
    systems = results["methods"]
    others = [name for name in systems if name != "plain"]
    categories = systems["plain"]["by_category"]
    if len(categories) < 2 or not others:
        return
    yield "Speed-up by category, and tokens a call:"
    yield ""
    yield from table_head(["texts", *(f"`{name}`" for name in others)])
    for name, plain in categories.items():
        rows = (systems[system]["by_category"][name] for system in others)
        cells = (f"{format_number(row['speedup'])} × ({format_number(row['tokens_per_call'])})" for row in rows)
        yield table_row([f"{name} ({plain['texts']})", *cells])
    yield ""


def _skipped(results: Mapping[str, Any]) -> Iterator[str]:
    if skipped := results.get("skipped"):
        yield f"Skipped for all systems, and in none of the figures: {len(skipped)} of the suite's tasks."
        yield ""
        yield from (f"- {line}" for line in skipped)
        yield ""


def _problems(results: Mapping[str, Any]) -> Iterator[str]:
    for name, system in results["methods"].items():
        for problem in system["problems"]:
            yield f"- **`{name}`: {problem}**"
    if any(system["problems"] for system in results["methods"].values()):
        yield ""


def _environment(results: Mapping[str, Any]) -> Iterator[str]:
    machine = results["machine"]
    where = machine["gpu"] or f"{cores_and_threads(machine)} of {machine['processor']}"
    versions = ", ".join(f"{name} {machine[name]}" for name in ("saltus", "torch", "transformers", "python"))
    packages = "".join(f"; {name} of {package}" for name, package in (results.get("packages") or {}).items())
    yield f"{where}; {versions}{packages}; commit {results['commit'] or 'unknown'}; {results['date'][:10]}."
    yield ""
    yield "```console"
    yield f"$ {results['command']}"
    yield "```"


def cores_and_threads(machine: Mapping[str, Any]) -> str:
    """The cores of a `machine_info`, and the threads where they are of another number: "1 thread on 2 cores"."""
    cores, threads = machine["cores"], machine.get("threads")
    count = f"{cores} core{'s' * (cores != 1)}"
    return count if threads in (None, cores) else f"{threads} thread{'s' * (threads != 1)} on {count}"


def table_head(names: list[str]) -> Iterator[str]:
    """The first two lines of a table."""
    yield table_row(names)
    yield "|" + "---|" * len(names)


def table_row(cells: Iterable[str]) -> str:
    """A line of a table."""
    escaped = (cell.replace("|", r"\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def format_number(value: float | int | None, digits: int = 2) -> str:
    """A number, or a dash where it is not known."""
    return "–" if value is None else f"{value:.{digits}f}"
