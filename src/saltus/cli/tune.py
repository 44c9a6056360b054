"""The tune command: find and save the fastest settings of Jacobi decoding on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from saltus.cli import options as o

SEARCH_PANEL = "Search"
NODE_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
MAX_DEPTH = 31  # draft tokens of a fixed-shape call, as in generate


def tune(
    model: o.Model = o.DEFAULT_MODEL,
    adapter: Annotated[
        Path | None,
        typer.Option(
            "--adapter",
            metavar="DIR",
            help="Use this adapter of [i]saltus train jacobi[/i].",
            rich_help_panel=o.MODEL_PANEL,
        ),
    ] = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    weights: o.Weights = "file",
    arithmetic: o.Arithmetic = "auto",
    chat_template: o.ChatTemplate = None,
    prompts: o.Prompts = None,
    texts: Annotated[
        int,
        typer.Option("--texts", metavar="N", min=1, help="Number of prompts.", rich_help_panel=SEARCH_PANEL),
    ] = 4,
    rounds: Annotated[
        int,
        typer.Option(
            "--rounds", metavar="N", min=1, help="Times that each prompt is answered.", rich_help_panel=SEARCH_PANEL
        ),
    ] = 2,
    max_cost_ratio: Annotated[
        float,
        typer.Option(
            "--max-cost-ratio",
            metavar="X",
            min=1.0,
            rich_help_panel=SEARCH_PANEL,
            help="A call may cost X times a call of one token; this limits its nodes.",
        ),
    ] = 2.0,
    max_new_tokens: o.MaxNewTokens = 48,
    temperature: o.Temperature = 0.0,
    seed: o.Seed = 0,
    save: Annotated[
        bool,
        typer.Option(
            "--save/--no-save", help="Save the best settings for generate and chat.", rich_help_panel=o.OUTPUT_PANEL
        ),
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Write tune.json and figures there.", rich_help_panel=o.OUTPUT_PANEL),
    ] = None,
    json: o.Json = False,
) -> None:
    """Find the fastest settings of the method jacobi for a model on this machine.

    It measures the cost of calls by nodes; then, with as many draft tokens as are affordable, tokens
    per second by block size and number of recycled n-grams; then, with the best of
    these, by the length of n-grams; then by live blocks and spawn ratio. Plain decoding
    runs beside them. No setting changes a text.

    [bold]Examples[/bold]

        saltus tune

        saltus tune --adapter adapter --prompts prompts.jsonl --texts 8 --out tuned

    generate, chat and saltus.load use the saved settings if jacobi is given no options;
    benchmarks do not. Run it on a quiet machine.
    """
    from saltus.cli.open_engine import open_engine, validate_settings

    validate_settings("jacobi", (), chat_template=chat_template, temperature=temperature, seed=seed)
    options: dict[str, Any] = {} if adapter is None else {"model": str(adapter)}
    engine = open_engine(
        model, "jacobi", {"jacobi": options}, dtype=dtype, device=device, weights=weights, arithmetic=arithmetic,
        chat_template=chat_template, max_draft_tokens=MAX_DEPTH, tuned_settings=False,
    )  # fmt: skip
    inputs = _select_prompts(prompts, texts)
    how = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    result = _search_settings(engine, inputs, how, rounds, max_cost_ratio, options)
    if save and result["complete"]:
        from saltus.cli.answers import print_note

        print_note(f"saved: {_save_tuned_settings(result, engine, model, options)}")
    if out:
        from saltus.cli.report import write_result
        from saltus.evaluation.reports.tuning_plots import write_figures

        write_result(out / "tune.json", result, write_figures)
    if json:
        from saltus.cli.report import print_json

        print_json(result)
    else:
        _show(result)
    if not result["complete"]:
        raise KeyboardInterrupt


def _select_prompts(prompts: Path | None, num_prompts: int) -> list[Any]:
    """Prompts evenly spread over a file, or over the quick suite."""
    from saltus.engine.prompts import read_prompts_file

    if prompts is None:
        import saltus.evaluation

        prompts = Path(saltus.evaluation.__file__).parent / "benchmarks" / "quick.jsonl"
    available = read_prompts_file(prompts)
    count = min(num_prompts, len(available))
    chosen = [available[number * len(available) // count] for number in range(count)]
    return [prompt.turns[0] if prompt.turns else list(prompt.messages) for prompt in chosen]


def _search_settings(
    engine: Any,
    prompts: list[Any],
    settings: Mapping[str, Any],
    rounds: int,
    max_cost_ratio: float,
    fixed_options: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of tune.json; after Ctrl-C `complete` is false."""
    from saltus.cli.bench_step import synchronizer
    from saltus.cli.progress import progress_bar
    from saltus.evaluation.profiling import call_timing as steps
    from saltus.evaluation.profiling.jacobi_tuning import JacobiSearch, affordable_draft_tokens
    from saltus.evaluation.profiling.roofline import measured_knee
    from saltus.evaluation.reports.environment import run_info

    model = engine.network.model
    length = min(256, (engine.target.context_length or 1024) // 2)
    nodes = (
        NODE_COUNTS if engine.network.max_draft_tokens is None else tuple(n for n in NODE_COUNTS if n <= MAX_DEPTH + 1)
    )
    grid, timings = steps.CallGrid(nodes, (length,), (1,), rounds=5), steps.CallTimings()
    with progress_bar(grid.num_calls, "measuring calls") as advance:
        vocabulary = model.get_output_embeddings().weight.shape[0]
        for _ in steps.measure_calls(engine.network, grid, vocabulary, timings, synchronize=synchronizer(model.device)):
            advance()
    calls = [{"nodes": cell.nodes, **steps.time_statistics(timings.call_seconds[cell])} for cell in grid.call_shapes]
    times = [row["ms"] for row in calls]
    max_draft_tokens = affordable_draft_tokens(nodes, times, max_cost_ratio)
    search, complete = JacobiSearch(engine, prompts, max_draft_tokens, settings, rounds, fixed_options), False
    try:
        with progress_bar(search.num_texts, "searching") as advance:
            for _ in search.run():
                advance()
        complete = True
    except KeyboardInterrupt:
        if not search.seconds:
            raise
    named = ("block_size", "candidates", "speedup")
    return {
        **run_info(
            engine,
            {**settings, "texts": len(prompts), "rounds": rounds, "max_cost_ratio": max_cost_ratio, **fixed_options},
        ),
        "complete": complete,
        "calls": calls,
        "knee": measured_knee(nodes, times),
        "max_draft_tokens": max_draft_tokens,
        "settings": search.table_rows(),
        "surface": {"points": [dict(zip(named, point, strict=True)) for point in search.speedup_points()]},
        "chosen": search.best_setting() if complete else {},
    }


def _save_tuned_settings(result: Mapping[str, Any], engine: Any, model: str, fixed_options: Mapping[str, Any]) -> Path:
    from saltus.engine.tuned_settings import TunedSettings, machine_name
    from saltus.loading.model_identity import model_fingerprint

    made = {name: result[name] for name in ("command", "date", "commit", "machine", "knee")}
    chosen = result["chosen"].items()
    made["speedup"] = next(row["speedup"] for row in result["settings"] if chosen <= row.items())
    return TunedSettings(
        "jacobi", model, machine_name(engine.network.model.device), fixed_options.get("model", ""),
        model_fingerprint(engine.network.model), result["chosen"], result["max_draft_tokens"], made,
    ).save()  # fmt: skip


def _show(result: Mapping[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    from saltus.cli.coloured_text import terminal

    console = terminal(soft_wrap=False)
    knee = f"knee at {result['knee']:.0f} nodes" if result["knee"] else "no knee"
    console.print(f"calls: {knee}; the search may use {result['max_draft_tokens']}")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for head in ("block", "candidates", "n-gram", "blocks", "spawn ratio", "tokens/s", "speed-up", "tokens/call"):
        table.add_column(head, justify="right")
    for row in sorted(result["settings"], key=lambda row: -row["tokens_per_second"]):
        named = [
            str(row.get(name, "")) for name in ("block_size", "candidates", "ngram_size", "max_blocks", "spawn_ratio")
        ]
        if "plain" in row:
            named[0] = "plain"
        rates = f"{row['tokens_per_second']:.1f}", f"{row['speedup']:.2f} ×", f"{row['tokens_per_call']:.2f}"
        table.add_row(*named, *rates)
    console.print(table)
    if result["chosen"]:
        console.print("chosen: " + ", ".join(f"{name} {value}" for name, value in result["chosen"].items()))
