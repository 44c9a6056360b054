"""Measure a decoding step: calls by nodes, texts and batch, the least they could cost, and where the time goes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from saltus.cli import options as o

GRID = "What is measured"


def step(
    model: o.Model = o.DEFAULT_MODEL,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    nodes: Annotated[
        str,
        typer.Option(metavar="N,…", help="Nodes of a call, its last decided token included.", rich_help_panel=GRID),
    ] = "1,2,4,8,16,32,64",
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,…",
            help="Tokens of the text before it. [dim]\\[default: 128 to 2,048, as the model's context allows][/dim]",
            rich_help_panel=GRID,
            show_default=False,
        ),
    ] = None,
    batches: Annotated[
        str, typer.Option(metavar="N,…", help="Texts that share a call.", rich_help_panel=GRID)
    ] = "1,2,4,8",
    rounds: Annotated[
        int, typer.Option(metavar="N", help="Rounds over all of them, after a warm-up.", rich_help_panel=GRID)
    ] = 7,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Write step.json and figures there.", rich_help_panel=o.OUTPUT),
    ] = None,
    json: o.Json = False,
) -> None:
    """Measure what a decoding step costs, and what it could cost.

    Every round makes every call once, so that a machine that drifts hurts all alike.
    The floor is what a call must read and compute, over what this machine reads and
    computes in the same minute. Ctrl-C ends it and keeps what is measured.

    [bold]Examples[/bold]

        saltus bench step --out step

        saltus bench step --nodes 1,8,32 --lengths 512 --batches 1 --rounds 3

    Measure on a quiet machine: two busy processes disturb each other far more than
    their share.
    """
    asked = {"nodes": numbers("--nodes", nodes), "batches": numbers("--batches", batches), "rounds": rounds}
    if lengths is not None:
        asked["lengths"] = numbers("--lengths", lengths)
    from saltus.evaluation.step import Grid, fitting

    Grid(**asked)  # a wrong number costs no loading
    from saltus.cli.loading import open_engine

    engine = open_engine(model, "lookup", None, dtype=dtype, device=device)
    grid = Grid(**{"lengths": fitting(engine.target.context), **asked})
    grid.check(engine.target.context, model)
    if out:
        out.mkdir(parents=True, exist_ok=True)
    result = measured(engine, grid)
    if json:
        from saltus.cli.report import print_json

        print_json(result)
    else:
        from saltus.cli.step_tables import show

        show(result)
    if out:
        _write(result, out)
    if not result["complete"]:
        raise KeyboardInterrupt


def numbers(option: str, given: str) -> tuple[int, ...]:
    """Whole numbers between commas. Errors: ValueError."""
    try:
        found = tuple(int(each) for each in given.split(",") if each.strip())
    except ValueError:
        raise ValueError(f"{option} is {given!r}, but must be whole numbers between commas, such as 1,8,32") from None
    if not found:
        raise ValueError(f"{option} is empty; give whole numbers, such as 1,8,32")
    return found


def measured(engine: Any, grid: Any) -> dict[str, Any]:
    """Everything of step.json; after Ctrl-C what there is, and `complete` is false."""
    from dataclasses import asdict

    from saltus.cli.progress import bar
    from saltus.evaluation import call_parts, loop_parts, roofline
    from saltus.evaluation import step as steps
    from saltus.evaluation.machine import circumstances

    network, model = engine.network, engine.network.model
    vocabulary = model.get_output_embeddings().weight.shape[0]
    settle = settling(model.device)
    timings, growth, done = steps.Timings(), {}, False
    parts: list[dict[str, Any]] = []
    loop: list[dict[str, Any]] = []
    needs = roofline.demand(model)
    can: Any = None
    profiled = profiled_nodes(grid.nodes)
    temperatures = (0.0, 0.8)
    with suppress(KeyboardInterrupt), bar(grid.calls + len(profiled) + len(temperatures) + 2, "measuring") as advance:
        can = roofline.speed(model.dtype, model.device)
        advance()
        for _ in steps.measure(network, grid, vocabulary, timings, settle=settle):
            advance()
        for count in profiled:
            parts.append(call_parts.call_parts(network, count, grid.middle, vocabulary, grid.rounds, settle=settle))
            advance()
        for temperature in temperatures:
            loop.append(loop_parts.loop_parts(engine, temperature=temperature, settle=settle))
            advance()
        growth = steps.memory_growth(network, vocabulary, engine.target.context)
        advance()
        done = True
    memory = {"bytes_of_a_token": needs.token_bytes, **growth}
    return {
        **circumstances(engine, {**asdict(grid), "batch_length": grid.middle}),
        "complete": done,
        **summary(grid, timings, needs, can),
        "parts": parts,
        "loop": loop,
        "memory": memory,
    }


def profiled_nodes(nodes: tuple[int, ...]) -> tuple[int, ...]:
    """The fewest, the middle and the most."""
    return tuple(dict.fromkeys((nodes[0], nodes[len(nodes) // 2], nodes[-1])))


def settling(device: Any) -> Any:
    """What waits until a device is done."""
    import torch

    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


def summary(grid: Any, timings: Any, needs: Any, can: Any) -> dict[str, Any]:
    """Calls and prefills with their spread; where the machine's speed is known, with their floors and the knees."""
    from dataclasses import asdict

    from saltus.evaluation import roofline
    from saltus.evaluation.step import spread

    calls, knees = [], []
    for cell in grid.cells:
        if cell not in timings.calls:
            continue
        row = {**cell._asdict(), **spread(timings.calls[cell])}
        if can is not None:
            row |= roofline.floor(needs, can, cell)
            row["efficiency"] = row["floor_ms"] / row["ms"]
        calls.append(row)
    for length in grid.lengths:
        if can is None:
            break
        here = [row for row in calls if row["length"] == length and row["batch"] == 1]
        known = roofline.measured_knee([row["nodes"] for row in here], [row["ms"] for row in here])
        knees.append({"length": length, "predicted": roofline.predicted_knee(needs, can, length), "measured": known})
    prefill = [{"length": length, **spread(seconds)} for length, seconds in timings.prefill.items()]
    return {
        "speed": asdict(can) if can else None,
        "demand": asdict(needs),
        "calls": calls,
        "prefill": prefill,
        "knees": knees,
    }


def _write(result: Mapping[str, Any], folder: Path) -> None:
    """step.json first: figures may fail for want of matplotlib."""
    from json import dumps

    from saltus.cli.answering import note

    (folder / "step.json").write_text(dumps(result, indent=1) + "\n", encoding="utf-8")
    from saltus.evaluation.step_plots import figures

    paths = figures(result, folder)
    note(f"written: {folder / 'step.json'}" + "".join(f", {path.name}" for path in paths if path.suffix == ".png"))
