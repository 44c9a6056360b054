"""Measure decoding steps: calls by nodes, text length and batch, their lower bound, and where the time goes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from saltus.cli import options as o

GRID_PANEL = "What is measured"


@o.with_options()
def step(
    *,
    model_options: o.ModelOptions,
    nodes: Annotated[
        str, o.in_panel(GRID_PANEL, metavar="N,…", help="Nodes of a call, its last decided token included.")
    ] = "1,2,4,8,16,32,64",
    lengths: Annotated[
        str | None,
        o.in_panel(
            GRID_PANEL,
            metavar="N,…",
            help="Tokens of the text before it. [dim]\\[default: 128 to 2,048, as the model's context allows][/dim]",
            show_default=False,
        ),
    ] = None,
    batches: Annotated[str, o.in_panel(GRID_PANEL, metavar="N,…", help="Texts that share a call.")] = "1,2,4,8",
    rounds: Annotated[int, o.in_panel(GRID_PANEL, metavar="N", help="Rounds over all of them, after a warm-up.")] = 7,
    out: Annotated[
        Path | None, o.in_panel(o.OUTPUT_PANEL, "--out", metavar="DIR", help="Write step.json and figures there.")
    ] = None,
    json: o.Json = False,
) -> None:
    """Measure what a decoding step costs, and what it could cost.

    Every round makes every call once, so that drift of the machine affects all
    alike. The lower bound is what a call must read and compute, at the bandwidth
    and the arithmetic that this machine reaches in the same run. Ctrl-C keeps
    what is measured.

    [bold]Examples[/bold]

        saltus bench step --out step

        saltus bench step --nodes 1,8,32 --lengths 512 --batches 1 --rounds 3

    Measure on a quiet machine: two busy processes slow each other far more than
    twofold.
    """
    inputs = {
        "nodes": parse_numbers("--nodes", nodes),
        "batches": parse_numbers("--batches", batches),
        "rounds": rounds,
    }
    if lengths is not None:
        inputs["lengths"] = parse_numbers("--lengths", lengths)
    from saltus.evaluation.profiling.call_timing import CallGrid, default_lengths

    CallGrid(**inputs)  # refuse wrong numbers before loading
    if out:
        from saltus.evaluation.benchmarks.benchmark_run import make_folder

        make_folder(out)
    from saltus.cli.open_engine import open_engine, validate_settings

    validate_settings("lookup", chat_template=model_options.chat_template)
    engine = open_engine(method="lookup", **asdict(model_options))
    grid = CallGrid(**{"lengths": default_lengths(engine.target.context_length), **inputs})
    grid.check_context_length(engine.target.context_length, model_options.model)
    result = measure_step(engine, grid)
    if json:
        from saltus.cli.report import print_json

        print_json(result)
    else:
        from saltus.cli.step_tables import print_tables

        print_tables(result)
    if out:
        from saltus.cli.report import write_result
        from saltus.evaluation.reports.step_plots import write_figures

        write_result(out / "step.json", result, write_figures)
    if not result["complete"]:
        raise KeyboardInterrupt


def parse_numbers(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers between commas. Errors: ValueError."""
    try:
        numbers = tuple(int(each) for each in text.split(",") if each.strip())
    except ValueError:
        raise ValueError(f"{option} is {text!r}, but must be whole numbers between commas, such as 1,8,32") from None
    if not numbers:
        raise ValueError(f"{option} is empty; give whole numbers, such as 1,8,32")
    return numbers


def measure_step(engine: Any, grid: Any) -> dict[str, Any]:
    """The content of step.json; after Ctrl-C `complete` is false."""
    from saltus.cli.progress import progress_bar
    from saltus.evaluation.profiling import call_profile, roofline, step_profile
    from saltus.evaluation.profiling import call_timing as steps
    from saltus.evaluation.reports.environment import run_info
    from saltus.kernels.model_weights import uses_integers

    network, model = engine.network, engine.network.model
    vocabulary = model.get_output_embeddings().weight.shape[0]
    synchronize = synchronizer(model.device)
    timings, growth, done = steps.CallTimings(), {}, False
    parts: list[dict[str, Any]] = []
    loop: list[dict[str, Any]] = []
    demand = roofline.count_demand(model)
    machine_speed: Any = None
    profiled = profiled_nodes(grid.nodes)
    temperatures = (0.0, 0.8)
    with (
        suppress(KeyboardInterrupt),
        progress_bar(grid.num_calls + len(profiled) + len(temperatures) + 2, "measuring") as advance,
    ):
        machine_speed = roofline.measure_machine_speed(model.dtype, model.device, integers=uses_integers(model))
        advance()
        for _ in steps.measure_calls(network, grid, vocabulary, timings, synchronize=synchronize):
            advance()
        for count in profiled:
            parts.append(
                call_profile.profile_call(
                    network, count, grid.batch_length, vocabulary, grid.rounds, synchronize=synchronize
                )
            )
            advance()
        for temperature in temperatures:
            loop.append(step_profile.profile_step(engine, temperature=temperature, synchronize=synchronize))
            advance()
        growth = steps.kv_cache_growth(network, vocabulary, engine.target.context_length)
        advance()
        done = True
    kv_cache = {"bytes_of_a_token": demand.token_bytes, **growth}
    return {
        **run_info(engine, {**asdict(grid), "batch_length": grid.batch_length}),
        "complete": done,
        **summarise_step(grid, timings, demand, machine_speed),
        "parts": parts,
        "loop": loop,
        "memory": kv_cache,
    }


def profiled_nodes(nodes: tuple[int, ...]) -> tuple[int, ...]:
    """The smallest, middle and largest node count."""
    return tuple(dict.fromkeys((nodes[0], nodes[len(nodes) // 2], nodes[-1])))


def synchronizer(device: Any) -> Any:
    """A function that waits until the device has finished."""
    import torch

    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


def summarise_step(grid: Any, timings: Any, demand: Any, machine_speed: Any) -> dict[str, Any]:
    """Calls and prefills with their spread, and with bounds and knees if the machine's speed is known."""
    from saltus.evaluation.profiling import roofline
    from saltus.evaluation.profiling.call_timing import time_statistics

    calls, knees = [], []
    for cell in grid.call_shapes:
        if cell not in timings.call_seconds:
            continue
        row = {**cell._asdict(), **time_statistics(timings.call_seconds[cell])}
        if machine_speed is not None:
            row |= roofline.lower_bound(demand, machine_speed, cell)
            row["efficiency"] = row["floor_ms"] / row["ms"]
        calls.append(row)
    for length in grid.lengths:
        if machine_speed is None:
            break
        here = [row for row in calls if row["length"] == length and row["batch"] == 1]
        known = roofline.measured_knee([row["nodes"] for row in here], [row["ms"] for row in here])
        knees.append(
            {"length": length, "predicted": roofline.predicted_knee(demand, machine_speed, length), "measured": known}
        )
    prefill = [{"length": length, **time_statistics(seconds)} for length, seconds in timings.prefill_seconds.items()]
    return {
        "speed": asdict(machine_speed) if machine_speed else None,
        "demand": asdict(demand),
        "calls": calls,
        "prefill": prefill,
        "knees": knees,
    }
