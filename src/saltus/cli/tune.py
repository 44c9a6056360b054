"""The tune command: find and save fast settings of Jacobi decoding on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from saltus.cli import options as o

SEARCH_PANEL = "Search"
NODE_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
COLUMNS = "block", "candidates", "n-gram", "blocks", "spawn ratio", "tokens a second", "speed-up", "tokens a call"
MAX_DEPTH = 31  # draft tokens of a fixed-shape call, as in generate


@o.with_options()
def tune(
    *,
    model_options: o.ModelOptions,
    adapter: Annotated[
        Path | None,
        o.in_panel(o.MODEL_PANEL, "--adapter", metavar="DIR", help="Use this adapter of [i]saltus train jacobi[/i]."),
    ] = None,
    prompts: o.Prompts = None,
    texts: Annotated[int, o.in_panel(SEARCH_PANEL, "--texts", metavar="N", min=1, help="Number of prompts.")] = 4,
    rounds: Annotated[
        int, o.in_panel(SEARCH_PANEL, "--rounds", metavar="N", min=1, help="Times that each prompt is answered.")
    ] = 2,
    max_cost_ratio: Annotated[
        float,
        o.in_panel(
            SEARCH_PANEL,
            "--max-cost-ratio",
            metavar="X",
            min=1.0,
            help="A call may cost X times a call of one token; this limits its nodes.",
        ),
    ] = 2.0,
    max_new_tokens: o.MaxNewTokens = 48,
    temperature: o.Temperature = 0.0,
    seed: o.Seed = 0,
    save: Annotated[
        bool, o.in_panel(o.OUTPUT_PANEL, "--save/--no-save", help="Save the best settings for generate and chat.")
    ] = True,
    json: o.Json = False,
) -> None:
    """Find fast settings of the method jacobi for a model on this machine.

    It measures the cost of calls by nodes; then, with as many draft tokens as are
    affordable, tokens per second by block size, number and length of recycled
    n-grams, live blocks and spawn ratio, one after the other. Plain decoding runs
    beside them. No setting changes a text.

    [bold]Examples[/bold]

        saltus tune

        saltus tune --adapter adapter --prompts prompts.jsonl --texts 8

    generate, chat and saltus.load use the saved settings if jacobi is given no
    options; benchmarks do not. Run it on a quiet machine.
    """
    from saltus.cli.open_engine import open_engine, validate_settings

    validate_settings("jacobi", chat_template=model_options.chat_template, temperature=temperature, seed=seed)
    options: dict[str, Any] = {} if adapter is None else {"model": str(adapter)}
    loading = {**asdict(model_options), "max_draft_tokens": MAX_DEPTH, "tuned_settings": False}
    inputs = select_prompts(prompts, texts)  # it raises errors before a model is loaded
    engine = open_engine(method="jacobi", options={"jacobi": options}, **loading)
    how = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    result = _search_settings(engine, inputs, how, rounds, max_cost_ratio, options)
    if save:
        from saltus.cli.answers import print_note

        print_note(f"saved: {_save_tuned_settings(result, engine, model_options.model, options)}")
    if json:
        from saltus.cli.report import print_json

        print_json(result)
    else:
        _show(result)


def select_prompts(prompts: Path | None, num_prompts: int) -> list[Any]:
    """Prompts evenly spread over a file, or over the quick suite."""
    from saltus.evaluation.benchmarks.suites import load_tasks

    chosen = [task.prompt for task in load_tasks("quick" if prompts is None else f"prompts:{prompts}", num_prompts)]
    return [prompt.turns[0] if prompt.turns else list(prompt.messages) for prompt in chosen]


def _search_settings(
    engine: Any,
    prompts: list[Any],
    settings: Mapping[str, Any],
    rounds: int,
    max_cost_ratio: float,
    fixed_options: Mapping[str, Any],
) -> dict[str, Any]:
    """The settings that were measured, and the fastest."""
    from saltus.cli.progress import progress_bar
    from saltus.engine.calibration import measure_call_seconds
    from saltus.evaluation.profiling.jacobi_tuning import JacobiSearch, affordable_draft_tokens
    from saltus.evaluation.reports.environment import run_info

    limit = engine.network.max_draft_tokens
    calls = measure_call_seconds(engine.network, [n for n in NODE_COUNTS if limit is None or n <= MAX_DEPTH + 1], 5)
    max_draft_tokens = affordable_draft_tokens(list(calls), list(calls.values()), max_cost_ratio)
    search = JacobiSearch(engine, prompts, max_draft_tokens, settings, rounds, fixed_options)
    with progress_bar(search.num_texts, "searching") as advance:
        for _ in search.run():
            advance()
    how = {**settings, "texts": len(prompts), "rounds": rounds, "max_cost_ratio": max_cost_ratio, **fixed_options}
    return {
        **run_info(engine, how), "call_seconds": calls, "max_draft_tokens": max_draft_tokens, "settings": search.rows,
        "chosen": search.best, "speedup": search.speedup,
    }  # fmt: skip


def _save_tuned_settings(result: Mapping[str, Any], engine: Any, model: str, fixed_options: Mapping[str, Any]) -> Path:
    from saltus.engine.tuned_settings import TunedSettings, machine_name
    from saltus.loading.model_identity import model_fingerprint

    made = {name: result[name] for name in ("command", "date", "commit", "machine", "speedup")}
    return TunedSettings(
        "jacobi", model, machine_name(engine.network.model.device), fixed_options.get("model", ""),
        model_fingerprint(engine.network.model), result["chosen"], result["max_draft_tokens"], made,
    ).save()  # fmt: skip


def _show(result: Mapping[str, Any]) -> None:
    from saltus.cli.coloured_text import new_table, terminal

    console = terminal(soft_wrap=False)
    console.print(f"a call may verify {result['max_draft_tokens']} draft tokens")
    table = new_table()
    for head in COLUMNS:
        table.add_column(head, justify="right", min_width=max(map(len, head.split())))
    for row in sorted(result["settings"], key=lambda row: -row["tokens_per_second"]):
        named = [
            str(row.get(name, "")) for name in ("block_size", "candidates", "ngram_size", "max_blocks", "spawn_ratio")
        ]
        if "plain" in row:
            named[0] = "plain"
        rates = f"{row['tokens_per_second']:.1f}", f"{row['speedup']:.2f} ×", f"{row['tokens_per_call']:.2f}"
        table.add_row(*named, *rates)
    console.print(table)
    console.print("chosen: " + ", ".join(f"{name} {value}" for name, value in result["chosen"].items()))
    if result["speedup"] <= 1:
        console.print("plain decoding is as fast; take --method lookup or auto here")
