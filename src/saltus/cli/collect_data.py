"""`saltus collect data`: the texts of a data set as training texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from saltus.cli import options as o
from saltus.cli.collect import Out, TextsPerFile
from saltus.cli.collection import training_command


def data(
    texts: Annotated[
        Path,
        o.in_panel(
            o.PROMPT_PANEL,
            "--texts",
            "-f",
            metavar="FILE",
            help='JSON lines with "prompt" and "completion", with "messages" that end with the assistant\'s, or with'
            ' "text"; or (.txt) a plain text with empty lines between its texts.',
        ),
    ],
    out: Out,
    model: o.Model = o.DEFAULT_MODEL,
    chat_template: o.ChatTemplate = None,
    max_new_tokens: Annotated[
        int | None,
        o.in_panel(
            o.LENGTH_PANEL,
            "--max-new-tokens",
            "-n",
            metavar="N",
            min=1,
            help="Tokens of an answer, at most. [dim]\\[default: as many as the model's context holds][/dim]",
        ),
    ] = None,
    texts_per_file: TextsPerFile = 128,
) -> None:
    """Write the texts of a data set as token ids, as if the model had answered its prompts.

    A model's drafts can be trained on any texts: the model says under which
    uniforms it would have written them. Their temperature counts as 1.

    [bold]Examples[/bold]

        saltus collect data --texts answers.jsonl --out data

        saltus train ptp -r smollm2-adapter --teacher teacher --teacher data
    """
    from saltus.cli.answers import print_note
    from saltus.cli.open_engine import open_engine, validate_settings
    from saltus.cli.progress import progress_meter
    from saltus.cli.report import number_of
    from saltus.training.data.given_texts import read_rows, write_given_texts
    from saltus.training.loop.checkpoint import lock_folder

    validate_settings("plain", chat_template=chat_template)
    total = len(read_rows(texts))  # it raises errors before a model is loaded
    engine = open_engine(model, "plain", chat_template=chat_template, tuned_settings=False)
    with lock_folder(out), progress_meter(total, "tokenizing", in_logs=True) as show:
        count, cut = write_given_texts(engine, texts, out, max_new_tokens, texts_per_file, show)
    limit = "the model's context ends" if max_new_tokens is None else f"--max-new-tokens {max_new_tokens:,}"
    print_note(f"{number_of(count, 'text')} in {out}" + (f"; {cut:,} of them were cut ({limit})" if cut else ""))
    print_note(f"  {training_command('ptp --recipe smollm2-adapter', out, model)}")
