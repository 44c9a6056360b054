"""Measure what methods are worth: all of them, and peers, on the same prompts in one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, no_type_check

import typer

from saltus.cli import options as o
from saltus.cli.bench_step import step

COMPARED, MEASURED = "What is compared", "On what"
METHODS = "plain,lookup,jacobi,jacobi+lookup"

bench = typer.Typer(invoke_without_command=True, rich_markup_mode="rich")
bench.command(rich_help_panel="Also")(step)


@bench.callback()
@no_type_check  # typer calls it with the context of its own click
def run(
    context: typer.Context,
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            metavar="NAME,…",
            help="Methods and their combinations ([i]saltus methods[/i] lists them); plain is always among them.",
            rich_help_panel=COMPARED,
        ),
    ] = METHODS,
    peers: Annotated[
        str | None,
        typer.Option(
            "--peers",
            metavar="NAME,…",
            help="transformers, transformers-lookup, transformers-assistant, or all.",
            rich_help_panel=COMPARED,
        ),
    ] = None,
    assistant: Annotated[
        str | None,
        typer.Option("--assistant", metavar="MODEL", help="The peer's small model.", rich_help_panel=COMPARED),
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            "--endpoint",
            metavar="URL",
            help="A running server of OpenAI's protocol, such as vLLM's or llama.cpp's; may be repeated.",
            rich_help_panel=COMPARED,
        ),
    ] = None,
    option: o.Options = None,
    budget: o.Budget = None,
    whole_trees: o.WholeTrees = False,
    rule: o.Rule = "match",
    suite: Annotated[
        str,
        typer.Option(
            "--suite",
            metavar="NAME[:WHERE]",
            help="quick, spec-bench, humaneval, mbpp, gsm8k or infilling, from WHERE: a file, or a data set such as "
            "owner/name:configuration@split; or prompts:FILE.",
            rich_help_panel=MEASURED,
        ),
    ] = "quick",
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", metavar="N", min=1, help="So many tasks, evenly spread over the suite.", rich_help_panel=MEASURED
        ),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="Continue texts without a chat template, where the suite can.", rich_help_panel=MEASURED
        ),
    ] = False,
    model: o.Model = o.DEFAULT_MODEL,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    max_new_tokens: o.MaxNewTokens = 128,
    ignore_eos: o.IgnoreEos = False,
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    seed: o.Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Write results, records, figures and a page there; a run that was interrupted goes on.",
            rich_help_panel=o.OUTPUT,
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure anew what DIR holds.", rich_help_panel=o.OUTPUT)
    ] = False,
    json: o.Json = False,
) -> None:
    """Measure methods against plain decoding and peers, on the same prompts in one run.

    [dim]Exit code 0: every text is plain's and nothing is wrong. 1: a method of
    ours differs, or wrote tokens that the model did not check.[/dim]

    Prompt by prompt all write in turns, another one first each time. Seconds
    are taken from outside, the reading of the prompt included. Calls are
    counted at the model, where each token must have been checked. Intervals
    are the central 95 % of a bootstrap over tasks.

    [bold]Examples[/bold]

        saltus bench

        saltus bench --suite spec-bench --limit 40 --peers all --out run

        saltus bench --suite humaneval --methods lookup -n 512 --out code

        saltus bench --suite prompts:FILE -t 0.8 --endpoint http://localhost:80

        saltus bench step --out step

    [bold]DIR[/bold] gets page.html to look at, results.md to quote, results.json,
    records.jsonl (each answer with its calls), figures, and answers in
    Spec-Bench's form.
    """
    if context.invoked_subcommand:
        return
    from saltus.evaluation.suites import grader_of, suite_of, tasks_of

    names = _names(methods)
    suite_of(suite)
    _refuse(names, peers, assistant, option, rule, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    tasks = tasks_of(suite, limit)
    from saltus.cli.loading import open_engine
    from saltus.core.sampling import Sampling
    from saltus.evaluation.machine import circumstances
    from saltus.evaluation.run import Bench, open_notebook

    parts = "+".join(dict.fromkeys("+".join(names).split("+")))
    engine = open_engine(
        model, parts, option, dtype=dtype, device=device, rule=rule, budget=budget, adaptive=not whole_trees,
        profile=False,
    )  # fmt: skip
    sides = _sides(engine, names, peers, assistant, endpoint or ())
    law = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    writing = {"max_new_tokens": max_new_tokens, "seed": seed, "ignore_eos": ignore_eos}
    run = Bench(engine, sides, tasks, {**writing, "sampling": Sampling(**law)}, raw, grader_of(suite, tasks))
    settings = {
        **writing,
        **law,
        "rule": rule,
        "budget": engine.budget,
        "adaptive": engine.adaptive,
        "raw": raw,
        "options": option or [],
    }
    notebook = open_notebook(out, _plan(engine, suite, run, settings), tasks, circumstances(engine, settings), fresh)
    whole = _measure(run, notebook)
    if not notebook.records:
        raise KeyboardInterrupt
    results = _results(suite, notebook)
    if out:
        _write(results, notebook.records, out)
    if json:
        from saltus.cli.report import print_json

        print_json(results)
    else:
        from saltus.cli.bench_tables import show

        show(results)
    if not whole:
        raise KeyboardInterrupt
    if _wrong(results):
        raise typer.Exit(1)


def _names(methods: str) -> list[str]:
    """Plain first, each once."""
    given = [name.strip() for name in methods.split(",") if name.strip()]
    return list(dict.fromkeys(["plain", *given]))


def _refuse(
    names: Sequence[str], peers: str | None, assistant: str | None, option: Sequence[str] | None, rule: str, **law: Any
) -> None:
    """Raise ValueError for what cannot be, before anything long begins."""
    from saltus.cli.loading import refuse
    from saltus.methods import make

    for name in names:
        make(name)
    refuse("+".join(dict.fromkeys("+".join(names).split("+"))), option, rule, **law)
    from saltus.evaluation.peers import check_peers

    check_peers(_peers(peers, assistant), assistant)


def _peers(peers: str | None, assistant: str | None) -> list[str]:
    from saltus.evaluation.peers import TRANSFORMERS

    if peers == "all":
        return [name for name in TRANSFORMERS if assistant or name != "transformers-assistant"]
    return [name.strip() for name in (peers or "").split(",") if name.strip()]


def _sides(
    engine: Any, names: Sequence[str], peers: str | None, assistant: str | None, endpoints: Sequence[str]
) -> list[Any]:
    from saltus.evaluation.peers import Endpoint, transformers_peers
    from saltus.evaluation.sides import method_sides

    servers = [Endpoint(url, engine) for url in endpoints]
    return [*method_sides(engine, names), *transformers_peers(_peers(peers, assistant), engine, assistant), *servers]


def _plan(engine: Any, suite: str, run: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a run this one: with another, the records in a folder could not be mixed."""
    from saltus.evaluation.suites import fingerprint

    return {
        "model": engine.target.name,
        "dtype": str(engine.network.model.dtype).removeprefix("torch."),
        "device": str(engine.network.model.device),
        "suite": suite,
        "tasks": fingerprint(list(run.tasks)),
        "sides": [side.name for side in run.sides],
        **settings,
    }


def _measure(run: Any, notebook: Any) -> bool:
    """Measure what is not measured yet; False if Ctrl-C ended it."""
    from saltus.cli.answering import note
    from saltus.cli.progress import bar

    done, total = notebook.done, len(run.tasks)
    if done:
        note(f"{done} of {total} tasks were measured before" + ("" if done < total else "; --fresh measures anew"))
    try:
        with bar(total - done, "measuring") as advance:
            if done < total:
                run.warm_up()
            for number in range(done, total):
                notebook.add(run.measure(number))
                advance()
    except KeyboardInterrupt:
        kept = "; the same command goes on from there" if notebook.file else "; with --out DIR it could go on"
        note(f"interrupted after {notebook.done} of {total} tasks{kept}")
        return False
    return True


def _results(suite: str, notebook: Any) -> dict[str, Any]:
    from saltus.evaluation.results import summarise
    from saltus.evaluation.suites import label

    turns = len({(record["task"], record["turn"]) for record in notebook.records})
    return {
        **notebook.circumstances,
        "suite": {"name": label(suite), "tasks": notebook.done, "turns": turns},
        "methods": summarise(notebook.records),
    }


def _write(results: dict[str, Any], records: list[dict[str, Any]], folder: Path) -> None:
    """Everything of a run; figures last, which may fail for want of matplotlib."""
    from json import dumps

    from saltus.cli.answering import note
    from saltus.evaluation.markdown import markdown
    from saltus.evaluation.spec_bench import answers

    (folder / "results.md").write_text(markdown(results), encoding="utf-8")
    (folder / "results.json").write_text(dumps(results, indent=1) + "\n", encoding="utf-8")
    if results["suite"]["name"].startswith("spec-bench"):
        (folder / "model_answer").mkdir(exist_ok=True)
        for side in results["methods"]:
            lines = "".join(dumps(answer) + "\n" for answer in answers(records, side, results["model"]["name"]))
            name = side.replace("/", "-").replace(":", "-")
            (folder / "model_answer" / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    try:
        from saltus.evaluation.page import page
        from saltus.evaluation.plots import figures

        figures(results, records, folder)
        (folder / "page.html").write_text(page(results, records), encoding="utf-8")
    except ModuleNotFoundError:
        note(f'written: {folder / "results.json"}; for figures and the page: pip install "saltus[bench]"')
    else:
        note(f"written: {folder / 'page.html'}, results.json, records.jsonl and figures")


def _wrong(results: Mapping[str, Any]) -> bool:
    """Is a text of our methods not plain's, where it must be, or is there any problem with one?"""
    ours = [side for side in results["methods"].values() if side["kind"] == "method"]
    exact = results["settings"]["rule"] == "match" or results["settings"]["temperature"] == 0
    return any(side["problems"] or (exact and side["identical"] != side["texts"]) for side in ours)
