"""Print the results of `saltus bench step` as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from saltus.cli.report import number_of


def print_tables(result: Mapping[str, Any]) -> None:
    """Print every table that has data."""
    from rich.text import Text

    from saltus.cli.coloured_text import terminal

    console = terminal(soft_wrap=False)
    model, settings = result["model"], result["settings"]
    console.print(Text(f"{model['name']}, {model['dtype']}, {model['device']}", "bold"))
    for number, (title, table) in enumerate(_tables(result, settings["batch_length"])):
        console.print(*([""] if number else []), Text(title, "dim"), table, sep="\n")
    if speed := result["speed"]:
        console.print()
        console.print(Text(_describe_machine(speed), "dim"))
    if not result["complete"]:
        console.print(Text("interrupted: this is what was measured until then", "yellow"))


def _tables(result: Mapping[str, Any], length: int) -> Iterable[tuple[str, Any]]:
    calls, rounds = result["calls"], result["settings"]["rounds"]
    alone = [row for row in calls if row["batch"] == 1]
    if alone:
        yield (
            f"milliseconds of a call by its nodes, median of {number_of(rounds, 'round')}",
            _table_by_length(alone, result["prefill"]),
        )
    if any(row["batch"] > 1 for row in calls):
        together = [row for row in calls if row["length"] == length]
        yield f"texts that share a call, {length:,} tokens and so many nodes each", _table_by_batch(together)
    if alone and result["speed"]:
        here = [row for row in alone if row["length"] == length]
        yield f"the least that it could cost, after {length:,} tokens", _floor_table(here)
        yield "the knee, in nodes", _knee_table(result["knees"])
    if result["parts"]:
        heads = [number_of(breakdown["nodes"], "node") for breakdown in result["parts"]]
        yield f"where the milliseconds of a call go, after {length:,} tokens", _parts_table(result["parts"], heads)
    if result["loop"]:
        heads = [
            "greedy" if breakdown["temperature"] == 0 else f"at {breakdown['temperature']}"
            for breakdown in result["loop"]
        ]
        yield f"where those of a step go, by {result['loop'][0]['method']}", _parts_table(result["loop"], heads)


def _table(*heads: str) -> Any:
    from saltus.cli.coloured_text import new_table

    table = new_table()
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", no_wrap=True)
    return table


def _table_by_length(rows: Sequence[Mapping[str, Any]], prefill: Sequence[Mapping[str, Any]]) -> Any:
    nodes, read = _values(rows, "nodes"), {row["length"]: _ms(row["ms"]) for row in prefill}
    table = _table("text", *map(str, nodes), "reading it")
    for length in _values(rows, "length"):
        here = {row["nodes"]: _ms(row["ms"]) for row in rows if row["length"] == length}
        table.add_row(f"{length:,} tokens", *(here.get(count, "–") for count in nodes), read.get(length, "–"))
    return table


def _table_by_batch(rows: Sequence[Mapping[str, Any]]) -> Any:
    nodes = _values(rows, "nodes")
    table = _table("texts", *map(str, nodes))
    for batch in _values(rows, "batch"):
        here = {row["nodes"]: _ms(row["ms"]) for row in rows if row["batch"] == batch}
        table.add_row(str(batch), *(here.get(count, "–") for count in nodes))
    return table


def _floor_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    table = _table("nodes", "reading", "computing", "floor", "measured", "spread", "floor/measured")
    for row in rows:
        spread = f"{_ms(row['low'])}–{_ms(row['high'])}"
        times = (_ms(row[name]) for name in ("memory_ms", "compute_ms", "floor_ms", "ms"))
        table.add_row(str(row["nodes"]), *times, spread, f"{row['efficiency']:.0%}")
    return table


def _knee_table(knees: Sequence[Mapping[str, Any]]) -> Any:
    table = _table("text", "computing passes reading", "a call costs 1.25 × one node's")
    for knee in knees:
        measured_nodes = "not within these nodes" if knee["measured"] is None else f"{knee['measured']:.1f}"
        table.add_row(f"{knee['length']:,} tokens", f"{knee['predicted']:.1f}", measured_nodes)
    return table


def _parts_table(breakdowns: Sequence[Mapping[str, Any]], heads: Sequence[str]) -> Any:
    table = _table("", *heads)
    for part in breakdowns[0]["parts"]:
        table.add_row(part, *(f"{breakdown['parts'][part]:.2f}" for breakdown in breakdowns))
    table.add_section()
    table.add_row("total", *(f"{breakdown['ms']:.2f}" for breakdown in breakdowns))
    table.add_row("without profiling", *(f"{breakdown['unprofiled_ms']:.2f}" for breakdown in breakdowns))
    return table


def _describe_machine(machine_speed: Mapping[str, Any]) -> str:
    bandwidth, compute = machine_speed["bytes_per_second"] / 1e9, machine_speed["flops_per_second"] / 1e9
    threads = number_of(machine_speed["threads"], "thread")
    unit = "Gop/s of 8-bit integers" if "integer_product_flops_per_second" in machine_speed["measured"] else "GFLOP/s"
    return f"this machine, measured: {bandwidth:.1f} GB/s, {compute:,.0f} {unit}, {threads}"


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[int]:
    return sorted({row[name] for row in rows})


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
