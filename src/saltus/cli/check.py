"""Does speculation change the text? A method against plain decoding, or a server with and without speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from saltus.cli import options as o
from saltus.cli.check_server import ServerOptions

DEFAULT_PROMPTS = (
    "Repeat the following sentence three times: The quick brown fox jumps over the lazy dog.",
    "Write a Python function that returns the n-th Fibonacci number, and explain each line.",
    "Correct the spelling: Their are many reasons why peple like too live in citys, but their are also many "
    "reasons why peple like too live in the contry.",
    "Tell me a short story about a lighthouse keeper and a whale.",
)
MODEL_TOKENS, SERVER_TOKENS = 64, 48


@o.with_options(omit=("rule", "min_p", "repetition_penalty"))
def check(
    *,
    server_options: ServerOptions,
    prompts: o.Prompts = None,
    limit: o.Limit = None,
    model_options: o.ModelOptions,
    method_options: o.MethodOptions,
    no_batch_invariant: Annotated[
        bool,
        o.in_panel(
            o.METHOD_PANEL,
            "--no-batch-invariant",
            help="Use kernels that round differently in calls of another shape, and see the flips.",
        ),
    ] = False,
    no_adaptive: o.NoAdaptive = False,
    max_new_tokens: Annotated[
        int | None,
        o.in_panel(
            o.LENGTH_PANEL,
            "--max-new-tokens",
            "-n",
            metavar="N",
            min=1,
            help="New tokens of an answer, at most."
            f" [dim]\\[default: {MODEL_TOKENS}; of a server {SERVER_TOKENS}][/dim]",
        ),
    ] = None,
    sampling_options: o.SamplingOptions,
    out: Annotated[
        Path | None,
        o.in_panel(o.OUTPUT_PANEL, "--out", metavar="DIR", help="Write page.html, report.md and report.json there."),
    ] = None,
    json: o.Json = False,
) -> None:
    """Does speculation change what users get? Of a server, or of a model in Python.

    [dim]Exit code 0: no. 1: it does. 2: the check could not be made.[/dim]

    [bold]A server[/bold] of OpenAI's protocol (vLLM, SGLang, llama.cpp, TensorRT-LLM,
    Ollama, Saltus) gets the same requests with and without speculation. What
    differs is compared with what differs when a request is repeated.

        saltus check --server http://localhost:8000 --against http://localhost:8001

        saltus check --server http://localhost:8000 --off '{"speculative": false}'

        saltus check --server URL --against URL --suite gsm8k --tasks 200 --out run

    [bold]A model in Python[/bold]: a method against plain decoding, prompt by prompt.

        saltus check --method jacobi+lookup

        saltus check --method lookup --no-adaptive

        saltus check --prompts spec_bench.jsonl --limit 20 -t 0.8 --json

        saltus check --no-batch-invariant --dtype bfloat16

    A flip is where a text first differs: the position of the new token (from 0,
    over all turns of the prompt), and the gap between the logits of the two
    tokens under plain decoding. The speed-up is relative to plain decoding in
    the same run, prompt by prompt in turn, after a warm-up, prefill included.
    """
    from saltus.cli.check_report import finish

    if out is not None:
        from saltus.evaluation.benchmarks.benchmark_run import make_folder

        make_folder(out)  # before anything is checked
    if server_options.server is not None:
        from saltus.cli.check_server import check_server

        _refuse_engine_options(model_options, method_options, sampling_options, not (no_batch_invariant or no_adaptive))
        name = "" if model_options.model == o.DEFAULT_MODEL else model_options.model
        tokens = max_new_tokens or SERVER_TOKENS
        report = check_server(server_options, name, prompts, limit, tokens, sampling_options.seed)
    else:
        if server_options != ServerOptions(api_key=server_options.api_key):
            raise ValueError("options of servers need a server; give --server URL")
        tokens, options = max_new_tokens or MODEL_TOKENS, (model_options, method_options, sampling_options)
        report = _check_model(prompts, limit, *options, not no_batch_invariant, not no_adaptive, tokens)
    finish(report, json, out)


def _refuse_engine_options(
    model: o.ModelOptions, method: o.MethodOptions, sampling: o.SamplingOptions, defaults_alone: bool
) -> None:
    """Raise ValueError for options that a server would not get."""
    own = o.ModelOptions(model=model.model), o.MethodOptions(), o.SamplingOptions(seed=sampling.seed)
    if (model, method, sampling) != own or not defaults_alone:
        raise ValueError(
            "with --server only --model, --seed and --max-new-tokens apply: how the server loads, drafts and samples is"
            " its own affair; leave the others out"
        )


def _check_model(
    prompts: Path | None,
    limit: int | None,
    models: o.ModelOptions,
    methods: o.MethodOptions,
    sampling_options: o.SamplingOptions,
    batch_invariant: bool,
    adaptive: bool,
    max_new_tokens: int,
) -> dict[str, Any]:
    """The report on a method."""
    from saltus.engine.prompts import Prompt, read_prompts

    inputs = read_prompts((), prompts, limit) if prompts else [Prompt((each,)) for each in DEFAULT_PROMPTS][:limit]
    from saltus.cli.open_engine import open_with_options

    engine, sampling = open_with_options(models, methods, sampling_options, exact=batch_invariant, adaptive=adaptive)
    from saltus.cli.progress import progress_bar
    from saltus.engine.comparison import compare_with_plain
    from saltus.evaluation.audit.audit_run import make_report
    from saltus.evaluation.audit.verdicts import method_verdicts

    settings = {**sampling, "max_new_tokens": max_new_tokens}
    with progress_bar(len(inputs), "comparing") as advance:
        result = compare_with_plain(engine, inputs, engine.method, settings, advance)
    facts = {"model": engine.target.name, "method": engine.method, "settings": settings, **result}
    return make_report(method_verdicts(result, [prompt.preview for prompt in inputs]), facts)
