"""Benchmark methods and baselines on the same prompts in one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, no_type_check

import typer

from saltus.cli import options as o
from saltus.cli.bench_results import has_problems, remove_results, results_of, write_results
from saltus.cli.bench_step import step
from saltus.cli.bench_systems import open_compared, read_methods, systems_under_test, validate_systems

COMPARED_PANEL, TASKS_PANEL = "Compare", "Tasks"
DEFAULT_METHODS = "plain,auto,lookup,jacobi+lookup"

bench = typer.Typer(invoke_without_command=True, rich_markup_mode="rich")
bench.command(rich_help_panel="Also")(step)


@bench.callback()
@o.with_options(omit=("min_p", "repetition_penalty"))
@no_type_check  # typer passes its own click's context
def run(
    *,
    context: typer.Context,
    methods: Annotated[
        str,
        o.in_panel(
            COMPARED_PANEL,
            "--methods",
            metavar="NAME,…",
            help="Methods and their combinations ([i]saltus methods[/i] lists them); plain is always among them.",
        ),
    ] = DEFAULT_METHODS,
    baselines: Annotated[
        str | None,
        o.in_panel(
            COMPARED_PANEL,
            "--baselines",
            metavar="NAME,…",
            help="transformers, transformers-lookup, transformers-assistant, llama-cpp (of a GGUF file), or all.",
        ),
    ] = None,
    assistant: Annotated[
        str | None,
        o.in_panel(
            COMPARED_PANEL,
            "--assistant",
            metavar="MODEL",
            help="The draft model of the baseline transformers-assistant.",
        ),
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        o.in_panel(
            COMPARED_PANEL,
            "--endpoint",
            metavar="URL",
            help="A running server of OpenAI's protocol, such as vLLM's or llama.cpp's; may be repeated.",
        ),
    ] = None,
    draft_model: o.DraftModel = None,
    option: o.Options = None,
    vary: Annotated[
        list[str] | None,
        o.in_panel(
            o.METHOD_PANEL,
            "--vary",
            metavar="METHOD.FIELD=V,V",
            help="Measure each method that has this option once for each value; several: all their combinations.",
        ),
    ] = None,
    max_draft_tokens: o.MaxDraftTokens = None,
    ngram_corpus: o.NgramCorpus = None,
    no_adaptive: o.NoAdaptive = False,
    rule: o.Rule = "match",
    suite: Annotated[
        str,
        o.in_panel(
            TASKS_PANEL,
            "--suite",
            metavar="NAME[:WHERE]",
            help="quick, spec-bench, humaneval, mbpp, gsm8k, math or infilling, from WHERE: a file, or a data set such "
            "as owner/name:configuration@split; or prompts:FILE.",
        ),
    ] = "quick",
    limit: Annotated[
        int | None,
        o.in_panel(TASKS_PANEL, "--limit", metavar="N", min=1, help="Use N tasks, evenly spread over the suite."),
    ] = None,
    seeds: Annotated[
        int,
        o.in_panel(
            TASKS_PANEL, "--seeds", metavar="N", min=1, help="Answer each prompt N times, with seeds from --seed on."
        ),
    ] = 1,
    raw: Annotated[
        bool, o.in_panel(TASKS_PANEL, "--raw", help="Continue texts without a chat template, if the suite can.")
    ] = False,
    model_options: o.ModelOptions,
    max_new_tokens: o.MaxNewTokens = 128,
    ignore_eos: o.IgnoreEos = False,
    sampling_options: o.SamplingOptions,
    out: Annotated[
        Path | None,
        o.in_panel(
            o.OUTPUT_PANEL,
            "--out",
            metavar="DIR",
            help="Write results, records, figures and a page there; an interrupted run continues.",
        ),
    ] = None,
    fresh: Annotated[
        bool, o.in_panel(o.OUTPUT_PANEL, "--fresh", help="Discard the results in DIR and start anew.")
    ] = False,
    json: o.Json = False,
) -> None:
    """Measure methods against plain decoding and baselines, on the same prompts in one run.

    [dim]Exit code 0: every text equals plain decoding's. 1: the text of a method
    differs, or has tokens that the model did not verify.[/dim]

    All systems answer each prompt in turns, another one first each time. Times
    are measured from outside, prefill included. Calls are counted at the model,
    which must have verified each token. Intervals are the central 95 % of a
    bootstrap over tasks. Of each drafter of a combination the offered, verified
    and accepted tokens are counted, and its stated probabilities are compared
    with what was accepted (ECE). Tasks that are longer than the context of the
    model or of a server are skipped for all systems, and listed.

    [bold]Examples[/bold]

        saltus bench

        saltus bench --suite spec-bench --limit 40 --baselines all --out run

        saltus bench --suite spec-bench -m FOLDER --chat-template vicuna

        saltus bench --suite humaneval --methods lookup -n 512 --out code

        saltus bench -m LARGE --draft-model SMALL --methods auto,lookup

        saltus bench --suite prompts:FILE -t 0.8 --endpoint http://localhost:8080

        saltus bench --methods lookup,ptp --vary ptp.model=drafter-a,drafter-b -t 0.8 --seeds 4 --out ablation

        saltus bench step --out step

    [bold]DIR[/bold] gets page.html, results.md, results.json, records.jsonl (each
    answer with its calls), figures, and answers in Spec-Bench's format.
    """
    if context.invoked_subcommand:
        return
    from saltus.evaluation.benchmarks.suites import find_grader, find_suite, load_tasks

    compared = read_methods(methods, option or (), vary or (), draft_model)
    find_suite(suite)
    validate_systems(
        compared, baselines, assistant, rule, chat_template=model_options.chat_template, **asdict(sampling_options)
    )
    tasks = load_tasks(suite, limit)
    from saltus.cli.answers import print_note
    from saltus.core.sampling import Sampling
    from saltus.evaluation.benchmarks.benchmark_run import Benchmark, make_folder, open_records
    from saltus.evaluation.reports.environment import run_info

    if out:
        make_folder(out)  # before a model is loaded
    engine = open_compared(
        compared, rule=rule, **asdict(model_options), max_draft_tokens=max_draft_tokens, adaptive=not no_adaptive,
        ngram_corpus=ngram_corpus or (), tuned_settings=False,
    )  # fmt: skip
    systems = systems_under_test(engine, compared.variants, baselines, assistant, endpoint or ())
    sampling = {name: getattr(sampling_options, name) for name in ("temperature", "top_k", "top_p", "coupling")}
    writing = {"max_new_tokens": max_new_tokens, "seed": sampling_options.seed, "ignore_eos": ignore_eos}
    grader = find_grader(suite, tasks)
    if grader is not None and grader.note:
        print_note(grader.note)
    run = Benchmark(engine, systems, tasks, {**writing, "sampling": Sampling(**sampling)}, raw, grader, seeds)
    settings: dict[str, Any] = {
        **writing, **sampling, "rule": rule, "max_draft_tokens": engine.decoder.max_draft_tokens,
        "adaptive": engine.decoder.adaptive, "raw": raw, "options": compared.option,
    }  # fmt: skip
    given = {
        "ngram_corpus": list(map(str, ngram_corpus or ())), "chat_template": model_options.chat_template,
        "assistant": assistant, "endpoints": endpoint, "vary": vary, "seeds": seeds if seeds > 1 else None,
    }  # fmt: skip
    settings |= {name: value for name, value in given.items() if value}
    settings |= _settings_of_machine(engine, compared.names, systems)
    info = run_info(engine, settings, compared.spec.split("+"))
    records = open_records(out, _run_plan(engine, suite, run, settings), tasks, info, fresh)
    if out and fresh:
        remove_results(out)
    whole = _measure(run, records)
    if whole and not records.answers:
        raise ValueError(f"no task fits into the context of all systems; of the first, {records.skipped[0]['skipped']}")
    if not records.answers:
        raise KeyboardInterrupt
    results = results_of(suite, records)
    if out:
        write_results(results, records.answers, out)
    _print_results(results, json)
    if not whole:
        raise KeyboardInterrupt
    if has_problems(results):
        raise typer.Exit(1)


def _settings_of_machine(engine: Any, names: Sequence[str], systems: Sequence[Any]) -> dict[str, str]:
    """What is chosen for this model and machine: how Transformers reads packed weights, and what `auto` is."""
    from saltus.cli.answers import print_note
    from saltus.kernels.model_weights import describe_weights, is_packed
    from saltus.methods import AUTO

    settings, model = {}, engine.network.model
    if is_packed(model) and any(system.name.startswith("transformers") for system in systems):
        settings["transformers_weights"] = dtype = str(model.dtype).removeprefix("torch.")
        methods = describe_weights(model)
        print_note(
            f"Transformers reads the weights as {dtype}, and the methods as {methods}; --weights bf16 compares alike"
        )
    if AUTO in names:
        settings[AUTO] = engine.decoder.chosen_method(AUTO)
        print_note(f"auto is {settings[AUTO]} here")
    return settings


def _run_plan(engine: Any, suite: str, run: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that identify a run: records of other runs cannot be mixed with it."""
    from saltus.evaluation.benchmarks.suites import tasks_fingerprint
    from saltus.kernels.model_weights import describe_weights

    return {
        "model": engine.target.name,
        "dtype": str(engine.network.model.dtype).removeprefix("torch."),
        "weights": describe_weights(engine.network.model),
        "device": str(engine.network.model.device),
        "suite": suite,
        "tasks": tasks_fingerprint(list(run.tasks)),
        "systems": [system.name for system in run.systems],
        **settings,
    }


def _measure(run: Any, records: Any) -> bool:
    """Measure the remaining tasks; False if Ctrl-C ended it."""
    from saltus.cli.answers import print_note
    from saltus.cli.progress import progress_bar

    done, total = records.num_finished_tasks, len(run.tasks)
    if done:
        print_note(
            f"{done} of {total} tasks were measured before" + ("" if done < total else "; --fresh measures anew")
        )
    try:
        with progress_bar(total - done, "measuring") as advance:
            if done < total:
                run.warm_up()
            for number in range(done, total):
                records.append(run.measure_task(number))
                advance()
    except KeyboardInterrupt:
        kept = "; the same command goes on from there" if records.file else "; with --out DIR it could go on"
        print_note(f"interrupted after {records.num_finished_tasks} of {total} tasks{kept}")
        return False
    return True


def _print_results(results: dict[str, Any], json: bool) -> None:
    if json:
        from saltus.cli.report import print_json

        print_json(results)
    else:
        from saltus.cli.bench_tables import print_tables

        print_tables(results)
