"""The infill command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from saltus.cli import options as o

AUTO = "auto"  # stories or code, which come with the package


@o.with_options(omit=("chat_template", "draft_model", "num_draft_tokens", "ngram_corpus"), model=AUTO)
def infill(
    *,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="A text with holes; - reads it from stdin.")
    ] = None,
    file: Annotated[
        Path | None, o.in_panel(o.PROMPT_PANEL, "--file", "-f", metavar="FILE", help="A file with holes.")
    ] = None,
    model_options: o.ModelOptions,
    method_options: o.InfillMethodOptions,
    open_tokens: Annotated[
        int | None,
        o.in_panel(
            o.LENGTH_PANEL,
            "--open",
            metavar="N",
            min=1,
            help="Tokens of a hole [[…]], at most. Without it 24, and 128 of a code model.",
        ),
    ] = None,
    sampling_options: o.SamplingOptions,
    steps: Annotated[
        bool, o.in_panel(o.OUTPUT_PANEL, "--steps", help="Colour the fillings by the call that decided them.")
    ] = False,
    json: o.Json = False,
) -> None:
    """Fill the holes of a text, several tokens a call, from the joint distribution of the missing tokens.

    [bold][[8]][/bold] has exactly 8 tokens; the model ends [bold][[…]][/bold] (or [[...]]) itself. A code
    model with fill-in-the-middle tokens fills one [bold][[…]][/bold].

    By default ([bold]--model auto[/bold]) one of two small models that come with Saltus fills
    the text: [bold]code[/bold] knows Python, [bold]stories[/bold] tales.

    [bold]Examples[/bold]

        saltus infill "Once upon a time there was a [[3]]. He lived in [[…]]."

        saltus infill -t 0.8 --seed 3 --steps "Tom was sad because [[12]]. Then Tom was happy."

        saltus infill --method plain "The cat [[6]] the mouse."

        saltus infill --file program.py

        saltus infill --file story.txt --json

        saltus infill -m Qwen/Qwen2.5-Coder-0.5B --file program.py

    [bold]With --json[/bold] the text is one object: text, fillings, tokens, model,
    method, calls, tokens_per_call, seconds, tokens_per_second, tokens_by_call,
    and of a code model's hole finish_reason.
    """
    if (text is None) == (file is None):
        raise ValueError("give one text with holes: in quotes, by --file, or - for stdin")
    from saltus.engine.text_files import read_stdin, read_text, typed_text

    inputs = read_text(file) if file is not None else read_stdin() if text == "-" else typed_text(str(text))
    from saltus.cli.answers import print_note
    from saltus.cli.open_engine import open_with_options
    from saltus.cli.report import FINISH_WORDS
    from saltus.cli.shipped_infill_models import check_model, choose_model
    from saltus.engine.infill_template import parse_template

    template = parse_template(inputs)
    if model_options.model == AUTO:
        name, note = choose_model(template)
        model_options = replace(model_options, model=name)
    else:
        note = check_model(template, model_options.model)
    engine, sampling = open_with_options(model_options, method_options, sampling_options)
    if note:
        print_note(note)
    infilling = engine.infill(template, open_tokens=open_tokens, **sampling)
    if json:
        _print_record(infilling, model_options.model, engine.method)
        return
    _print_text(infilling, steps)
    cut = f" · {FINISH_WORDS['length']}; raise --open" if infilling.finish_reason == "length" else ""
    print_note(f"{infilling.statistics} · {engine.method} on {model_options.model}{cut}")


def _print_record(infilling: Any, model: str, method: str) -> None:
    from saltus.cli.report import print_json

    counted = infilling.statistics
    print_json({
        "text": infilling.text, "fillings": infilling.fillings, "tokens": infilling.tokens, "model": model,
        "method": method, "calls": counted.calls, "tokens_per_call": counted.tokens_per_call,
        "seconds": counted.seconds, "tokens_per_second": counted.tokens_per_second,
        "tokens_by_call": counted.tokens_by_call,
        **({"finish_reason": infilling.finish_reason} if infilling.finish_reason else {}),
    })  # fmt: skip


def _print_text(infilling: Any, steps: bool) -> None:
    """Print the text; with `steps`, colour the fillings by call."""
    from saltus.cli.coloured_text import ColouredTextWriter, terminal

    painter = ColouredTextWriter(terminal(colour=True if steps else None), steps)
    if not steps:
        painter.write(infilling.text, 0, 1)
        painter.finish_line()
        return
    by_call = iter([(call.index, len(call.tokens)) for call in infilling.calls for _ in call.tokens])
    plain = ColouredTextWriter(painter.console, False)
    for number, piece in enumerate(infilling.layout.pieces):
        plain.write(piece, 0, 1)
        for text in infilling.token_texts[number] if number < len(infilling.token_texts) else ():
            painter.write(text, *next(by_call))
    painter.finish_line()
