"""Compare a method with plain decoding, prompt by prompt: same text, and how much faster?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from saltus.cli import options as o
from saltus.engine.prompts import Prompt, read_prompts

DEFAULT_PROMPTS = (
    "Repeat the following sentence three times: The quick brown fox jumps over the lazy dog.",
    "Write a Python function that returns the n-th Fibonacci number, and explain each line.",
    "Correct the spelling: Their are many reasons why peple like too live in citys, but their are also many "
    "reasons why peple like too live in the contry.",
    "Tell me a short story about a lighthouse keeper and a whale.",
)


@o.with_options(omit=("rule", "min_p", "repetition_penalty"))
def check(
    *,
    prompts: o.Prompts = None,
    limit: o.Limit = None,
    model_options: o.ModelOptions,
    method_options: o.MethodOptions,
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant/--no-batch-invariant",
            help="Use kernels that round alike in calls of any shape; without, see the flips.",
            rich_help_panel=o.METHOD_PANEL,
        ),
    ] = True,
    max_new_tokens: o.MaxNewTokens = 64,
    sampling_options: o.SamplingOptions,
    json: o.Json = False,
) -> None:
    """Answer prompts with a method and with plain decoding, and compare.

    [dim]Exit code 0: every text is the same. 1: some differ.[/dim]

    [bold]Examples[/bold]

        saltus check --method jacobi+lookup

        saltus check --prompts spec_bench.jsonl --limit 20 -t 0.8 --json

        saltus check --no-batch-invariant --dtype bfloat16

    [bold]A flip[/bold] is where a text first differs: the prompt (counted from 0), the
    position of the new token (from 0, over all turns of the prompt), and the gap
    between the logits of the two tokens under plain decoding.

    [bold]The speed-up[/bold] is relative to plain decoding in the same run, prompt by
    prompt in turn, after a warm-up, prefill included.
    """
    inputs = read_prompts((), prompts, limit) if prompts else [Prompt((each,)) for each in DEFAULT_PROMPTS][:limit]
    from saltus.cli.open_engine import open_with_options

    engine, sampling = open_with_options(model_options, method_options, sampling_options, exact=batch_invariant)
    from saltus.cli.progress import progress_bar
    from saltus.engine.comparison import compare_with_plain

    settings = {**sampling, "max_new_tokens": max_new_tokens}
    with progress_bar(len(inputs), "comparing") as advance:
        result = compare_with_plain(engine, inputs, engine.method, settings, advance)
    if json:
        from saltus.cli.report import print_json

        print_json(result)
    else:
        _show(result, inputs, engine.method)
    if result["flips"]:
        raise typer.Exit(1)


def _show(result: Mapping[str, Any], inputs: list[Prompt], method: str) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from saltus.cli.coloured_text import terminal

    console = terminal(soft_wrap=False)
    same = result["identical"] == result["prompts"]
    console.print(Text(f"{method} against plain decoding", "bold"))
    table = Table.grid(padding=(0, 3))
    table.add_row("  same text", Text(f"{result['identical']} of {result['prompts']}", "green" if same else "red"))
    table.add_row("  tokens per call", f"{result['tokens_per_call']:.2f}")
    table.add_row("  speed-up", f"{result['speedup']:.2f} × (same run, prefill included)")
    console.print(table)
    if result["flips"]:
        flips = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
        for name in ("prompt", "position", "logit gap"):
            flips.add_column(name, justify="right")
        flips.add_column("which begins", no_wrap=True, overflow="ellipsis")
        for flip in result["flips"]:
            opening = " ".join(inputs[flip["prompt"]].preview.split())
            flips.add_row(str(flip["prompt"]), str(flip["position"]), f"{flip['logit_gap']:.4g}", Text(opening))
        console.print()
        console.print(flips)
