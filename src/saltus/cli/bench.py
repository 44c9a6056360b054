"""Benchmark methods and baselines on the same prompts in one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Annotated, Any, no_type_check

import typer

from saltus.cli import options as o
from saltus.cli.bench_results import has_problems, remove_results, results_of, write_results
from saltus.cli.bench_step import step

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
    adaptive: o.Adaptive = True,
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

        saltus bench --suite prompts:FILE -t 0.8 --endpoint http://localhost:80

        saltus bench --methods lookup,ptp --vary ptp.model=drafter-a,drafter-b -t 0.8 --seeds 4 --out ablation

        saltus bench step --out step

    [bold]DIR[/bold] gets page.html, results.md, results.json, records.jsonl (each
    answer with its calls), figures, and answers in Spec-Bench's format.
    """
    if context.invoked_subcommand:
        return
    from saltus.evaluation.benchmarks.suites import find_grader, find_suite, load_tasks

    names = _method_names(methods)
    option = _with_draft_model(option or (), vary or (), draft_model)
    find_suite(suite)
    spec = _joined(names, [*option, *(vary or ())])
    varied = _varied(vary or (), spec)
    variants = _variants(names, spec, varied, option)
    opened_with = [*option, *(assignments[0] for assignments in varied.values())]
    _validate_settings(
        names,
        spec,
        baselines,
        assistant,
        opened_with,
        rule,
        chat_template=model_options.chat_template,
        **asdict(sampling_options),
    )
    tasks = load_tasks(suite, limit)
    from saltus.cli.answers import print_note
    from saltus.cli.open_engine import open_engine, parse_method_options
    from saltus.core.sampling import Sampling
    from saltus.evaluation.benchmarks.benchmark_run import Benchmark, make_folder, open_records
    from saltus.evaluation.reports.environment import run_info
    from saltus.methods import AUTO, WITH_DRAFT_MODEL

    if out:
        make_folder(out)  # before a model is loaded
    loaded_now = [name for name in names if name != AUTO] + [WITH_DRAFT_MODEL] * (WITH_DRAFT_MODEL in spec.split("+"))
    engine = open_engine(
        method=_joined(loaded_now), options=parse_method_options(opened_with, spec), rule=rule, **asdict(model_options),
        max_draft_tokens=max_draft_tokens, adaptive=adaptive, ngram_corpus=ngram_corpus or (), tuned_settings=False,
    )  # fmt: skip
    systems = _systems_under_test(engine, variants, baselines, assistant, endpoint or ())
    sampling = {name: getattr(sampling_options, name) for name in ("temperature", "top_k", "top_p", "coupling")}
    writing = {"max_new_tokens": max_new_tokens, "seed": sampling_options.seed, "ignore_eos": ignore_eos}
    grader = find_grader(suite, tasks)
    if grader is not None and grader.note:
        print_note(grader.note)
    run = Benchmark(engine, systems, tasks, {**writing, "sampling": Sampling(**sampling)}, raw, grader, seeds)
    settings: dict[str, Any] = {
        **writing,
        **sampling,
        "rule": rule,
        "max_draft_tokens": engine.decoder.max_draft_tokens,
        "adaptive": engine.decoder.adaptive,
        "raw": raw,
        "options": option,
    }
    given = {
        "ngram_corpus": list(map(str, ngram_corpus or ())), "chat_template": model_options.chat_template,
        "assistant": assistant, "endpoints": endpoint, "vary": vary, "seeds": seeds if seeds > 1 else None,
    }  # fmt: skip
    settings |= {name: value for name, value in given.items() if value} | _settings_of_machine(engine, names, systems)
    info = run_info(engine, settings, spec.split("+"))
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
    if json:
        from saltus.cli.report import print_json

        print_json(results)
    else:
        from saltus.cli.bench_tables import print_tables

        print_tables(results)
    if not whole:
        raise KeyboardInterrupt
    if has_problems(results):
        raise typer.Exit(1)


def _method_names(methods: str) -> list[str]:
    """The names, each once, plain first."""
    given = [name.strip() for name in methods.split(",") if name.strip()]
    return list(dict.fromkeys(["plain", *given]))


def _with_draft_model(option: Sequence[str], vary: Sequence[str], draft_model: str | None) -> list[str]:
    """The assignments of --option with that of --draft-model. Errors: ValueError if others name a draft model, too."""
    if draft_model is None:
        return list(option)
    named = f"small_model.model={draft_model}"
    for given, assignments in (("--option", option), ("--vary", vary)):
        for other in assignments:
            if other.startswith("small_model.model=") and other != named:
                raise ValueError(f"--draft-model is {draft_model}, but {given} says {other}; give one of them")
    return list(dict.fromkeys([*option, named]))


def _varied(vary: Sequence[str], spec: str) -> dict[str, list[str]]:
    """The assignments METHOD.FIELD=VALUE of each varied option, by METHOD.FIELD. Errors: ValueError of one line."""
    from saltus.cli.open_engine import parse_method_options

    varied: dict[str, list[str]] = {}
    for each in vary:
        place, _, values = each.partition("=")
        if not values:
            raise ValueError(f"--vary {each}: write METHOD.FIELD=VALUE,VALUE, such as lookup.max_ngram_size=3,5")
        varied.setdefault(place, []).extend(f"{place}={value}" for value in values.split(","))
    for assignments in varied.values():
        for assignment in assignments:
            parse_method_options([assignment], spec, "--vary", "--methods")
    return varied


def _variants(names: Sequence[str], spec: str, varied: Mapping[str, Sequence[str]], option: Sequence[str]) -> list[Any]:
    """Each method, once for each combination of the varied options that it has. Errors: ValueError of one line."""
    from saltus.cli.open_engine import parse_method_options
    from saltus.evaluation.benchmarks.systems_under_test import MethodVariant
    from saltus.methods import make_methods

    variants = []
    for name in names:
        parts = _joined([name], [*option, *(values[0] for values in varied.values())]).split("+")
        own = [values for place, values in varied.items() if place.partition(".")[0] in parts]
        for chosen in product(*own):
            options = parse_method_options([*option, *chosen], spec, named_by="--methods")
            make_methods(name, options)
            variants.append(MethodVariant(" ".join((name, *chosen)), name, options))
    return variants


def _joined(names: Sequence[str], assignments: Sequence[str] = ()) -> str:
    """One spec of all methods that the names may stand for where these options are given."""
    from saltus.cli.open_engine import name_draft_model
    from saltus.methods import method_names

    drafts = name_draft_model(assignments)
    return "+".join(dict.fromkeys(part for name in names for part in method_names(name, drafts)))


def _validate_settings(
    names: Sequence[str],
    spec: str,
    baselines: str | None,
    assistant: str | None,
    option: Sequence[str] | None,
    rule: str,
    **settings: Any,
) -> None:
    """Raise ValueError for wrong settings, before anything long begins."""
    from saltus.cli.open_engine import parse_method_options, validate_settings
    from saltus.methods import make_methods

    for name in names:
        make_methods(name)
    validate_settings(spec, parse_method_options(option or (), spec, named_by="--methods"), rule, **settings)
    from saltus.evaluation.benchmarks.baselines import check_baselines

    check_baselines(_baselines(baselines, assistant), assistant)


def _baselines(baselines: str | None, assistant: str | None, is_gguf: bool = True) -> list[str]:
    """The names that were given; `all`: those that are installed, and read files of the model's kind."""
    from saltus.evaluation.benchmarks.baselines import BASELINES
    from saltus.evaluation.benchmarks.llama_cpp_baseline import LLAMA_CPP, llama_cpp_is_installed

    if baselines == "all":
        lacking = {"transformers-assistant": not assistant, LLAMA_CPP: not (is_gguf and llama_cpp_is_installed())}
        return [name for name in BASELINES if not lacking.get(name)]
    return [name.strip() for name in (baselines or "").split(",") if name.strip()]


def _systems_under_test(
    engine: Any, variants: Sequence[Any], baselines: str | None, assistant: str | None, endpoints: Sequence[str]
) -> list[Any]:
    from saltus.evaluation.benchmarks.baselines import baselines_under_test, servers_under_test
    from saltus.evaluation.benchmarks.llama_cpp_baseline import reads_gguf
    from saltus.evaluation.benchmarks.systems_under_test import methods_under_test

    chosen = _baselines(baselines, assistant, baselines != "all" or reads_gguf(engine))
    return [
        *methods_under_test(engine, variants),
        *baselines_under_test(chosen, engine, assistant),
        *servers_under_test(endpoints, engine),
    ]


def _settings_of_machine(engine: Any, names: Sequence[str], systems: Sequence[Any]) -> dict[str, str]:
    """What is chosen for this model and machine: how Transformers reads packed weights, and what `auto` is."""
    from saltus.cli.answers import print_note
    from saltus.kernels.packed_weight import describe_weights, is_packed
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
    from saltus.kernels.packed_weight import describe_weights

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
