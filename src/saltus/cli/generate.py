"""The generate command."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from saltus.cli import options as o
from saltus.engine.prompts import Conversation, Prompt, read_prompts

MAX_SHOWN = 72  # characters of a prompt above its answer


@o.with_options()
def generate(
    *,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT", help="The prompt, in quotes; several get an answer each; - reads it from stdin."
        ),
    ] = None,
    prompts: o.Prompts = None,
    limit: o.Limit = None,
    system: o.System = None,
    raw: o.Raw = False,
    model_options: o.ModelOptions,
    method_options: o.MethodOptions,
    max_new_tokens: o.MaxNewTokens = 256,
    stop: o.Stop = None,
    ignore_eos: o.IgnoreEos = False,
    sampling_options: o.SamplingOptions,
    grammar_options: o.GrammarOptions,
    colour: o.Colour = None,
    compare: Annotated[
        bool, o.in_panel(o.OUTPUT_PANEL, "--compare", help="Decode it with plain decoding, too, and compare.")
    ] = False,
    json: o.Json = False,
) -> None:
    """Answer prompts, several tokens a call.

    [dim]The answer is streamed to stdout, statistics go to stderr.[/dim]

    [bold]Examples[/bold]

        saltus generate "List three uses of a paper clip."

        saltus generate --compare "Count from 1 to 50."

        saltus generate -t 0.8 --seed 3 --system "Answer in rhymes." "Who are you?"

        saltus generate --prompts prompts.jsonl --method jacobi+lookup --json

        cat novel.txt | saltus generate - --raw --max-new-tokens 64

        saltus generate --json-schema person.json "Invent a person."

    [bold]With --json[/bold] each prompt (each turn, where there are turns) is one object:
    prompt, text, tokens, finish_reason, method, calls, tokens_per_call, seconds,
    tokens_per_second, prefill_seconds, tokens_by_call.
    """
    inputs = read_prompts(prompt or (), prompts, limit)
    if len(prompt or ()) > 1 and not any(" " in word for word in prompt or ()):
        from saltus.cli.answers import print_note

        print_note(f"{len(inputs)} prompts, an answer each; put a prompt of several words in quotes")
    if compare and json:
        raise ValueError("--compare is for reading; `saltus check --json` compares for programs")
    if raw and (system or any(len(each.turns) != 1 for each in inputs)):
        raise ValueError("--raw continues a text as it is; leave out --system, messages and turns, or leave out --raw")
    from saltus.cli.open_engine import open_with_options

    grammar = grammar_options.read()
    engine, sampling = open_with_options(model_options, method_options, sampling_options)
    settings = {
        **sampling, "max_new_tokens": max_new_tokens, "stop": stop or (), "ignore_eos": ignore_eos, "raw": raw,
        "grammar": grammar,
    }  # fmt: skip
    if json:
        _print_records(engine, inputs, system, engine.method, settings)
    else:
        _print_answers(engine, inputs, system, engine.method, settings, colour, compare)


def _print_records(
    engine: Any, inputs: Sequence[Prompt], system: str | None, method: str, settings: Mapping[str, Any]
) -> None:
    from saltus.cli.report import print_json, record

    for prompt in inputs:
        conversation = Conversation(prompt, system)
        for turn in conversation.turns():
            written = engine.stream(turn.prompt, **settings)
            try:
                for _ in written:
                    pass
            except BaseException:
                if written.generation.tokens:  # keep an interrupted answer, with finish_reason null
                    print_json(record(turn.shown_prompt, written.generation, method))
                raise
            print_json(record(turn.shown_prompt, written.generation, method))
            conversation.add_answer(written.generation.text)


def _print_answers(
    engine: Any,
    inputs: Sequence[Prompt],
    system: str | None,
    method: str,
    settings: Mapping[str, Any],
    colour: bool | None,
    compare: bool,
) -> None:
    from saltus.cli.answers import print_note, run_again, stream_answer
    from saltus.cli.coloured_text import ColouredTextWriter, terminal
    from saltus.cli.report import comparison_line, statistics_line
    from saltus.engine.comparison import warm_up

    console = terminal(colour=colour)
    coloured = console.is_terminal and method != "plain" if colour is None else colour
    several = len(inputs) > 1 or len(inputs[0].turns) > 1
    first = True
    for prompt in inputs:
        conversation = Conversation(prompt, system)
        for turn in conversation.turns():
            if several:
                print("" if first else "\n", end="", flush=True)
                if sys.stderr.isatty():
                    shown = turn.shown_prompt if isinstance(turn.shown_prompt, str) else prompt.preview
                    print_note(f"› {_shorten(shown)}")
            if compare and first:
                warm_up(engine, turn.prompt, (method, "plain"), settings)
            first = False
            if compare:
                engine.decoder.prefix_tree.clear()  # both read the prompt
            generation = stream_answer(engine, turn.prompt, ColouredTextWriter(console, coloured), settings)
            if compare:
                print_note(comparison_line(generation, run_again(engine, turn.prompt, settings), method))
            else:
                print_note(statistics_line(generation, method))
            conversation.add_answer(generation.text)


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_SHOWN else line[: MAX_SHOWN - 1] + "…"
