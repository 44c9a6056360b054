"""`saltus collect states`: a model's hidden states of texts, in the formats that other trainers read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from saltus.cli import options as o
from saltus.cli.collect import WORK_PANEL
from saltus.cli.collection import count_texts

TEXT_PANEL = "Texts"


def states(
    texts: Annotated[
        Path,
        o.in_panel(
            TEXT_PANEL,
            "--texts",
            "-f",
            metavar="PATH",
            help="A folder of [i]saltus collect text[/i] or one of its files, or JSON lines as [i]saltus collect"
            ' data[/i] takes: with "prompt" and "completion", with "messages", or with "text".',
        ),
    ],
    to: Annotated[
        str, o.in_panel(o.OUTPUT_PANEL, "--to", metavar="TRAINER", help="speculators, or specforge (SpecForge).")
    ],
    out: Annotated[
        Path, o.in_panel(o.OUTPUT_PANEL, "--out", metavar="DIR", help="The states; a repeated command continues there.")
    ],
    layers: Annotated[
        str,
        o.in_panel(
            WORK_PANEL,
            "--layers",
            metavar="LAYERS",
            help="States after how many layers: numbers such as 2,15,27, or a method's choice: eagle3 (2, the middle"
            " one, the last but 3) or dflash (five from 2 to the last but 2).",
        ),
    ] = "eagle3",
    limit: Annotated[
        int | None, o.in_panel(TEXT_PANEL, "--limit", metavar="N", min=1, help="Only the first N texts.")
    ] = None,
    max_length: Annotated[
        int | None,
        o.in_panel(
            TEXT_PANEL,
            "--max-length",
            metavar="N",
            min=2,
            help="Cut texts after N tokens. [dim]\\[default: the model's context][/dim]",
        ),
    ] = None,
    model: o.Model = o.DEFAULT_MODEL,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    chat_template: o.ChatTemplate = None,
) -> None:
    """Write the hidden states of texts for other trainers of draft heads, a file for each text.

    speculators (vLLM project) and SpecForge (SGLang) train EAGLE-3, DFlash and
    others from such files. States are bfloat16: a token takes 2 bytes for each
    number of each layer and of the last states.

    [dim]Give the same command again after an interruption: it writes the files that
    are missing.[/dim]

    [bold]Examples[/bold]

        saltus collect text --prompts prompts.jsonl --out teacher

        saltus collect states --texts teacher --to speculators --out states

        saltus collect states -f teacher --to specforge --layers dflash --limit 1000 --out states

    The losses of these trainers count the completion's tokens, not the prompt's.
    """
    from saltus.cli.answers import print_note
    from saltus.cli.open_engine import open_engine, validate_settings
    from saltus.cli.report import number_of
    from saltus.training.data import states_for_trainers as trainers
    from saltus.training.data.state_formats import FORMATS
    from saltus.training.loop.checkpoint import lock_folder

    if to not in FORMATS:
        raise ValueError(f"--to {to}: there are {', '.join(FORMATS)}")
    FORMATS[to].check_installed()
    choose = trainers.parse_layers(layers)
    validate_settings("plain", chat_template=chat_template)
    tokenize = _read(texts)  # it raises errors before a model is loaded
    engine = open_engine(model, "plain", chat_template=chat_template, dtype=dtype, device=device, tuned_settings=False)
    if not engine.network.accepts_drafters:
        raise ValueError(f"{engine.target.name} returns no hidden states to drafters; take a causal model")
    config = engine.network.model.config.get_text_config()
    chosen = choose(config.num_hidden_layers)
    trainers.check_layers(chosen, config.num_hidden_layers, engine.target.name)
    samples = _cut(tokenize(engine), min(filter(None, (max_length, engine.target.context_length)), default=None))
    if not (kept := samples[:limit]):
        raise ValueError(
            f"{texts} has no text with {trainers.MIN_COMPLETION} tokens after its prompt; give longer ones"
        )
    plan = trainers.StateCollection(kept, to, chosen)
    with lock_folder(out):
        metadata = plan.metadata(engine.network, engine.target.name)
        missing = trainers.prepare_folder(out, plan, metadata, config.hidden_size)
        progress = ((1, tokens) for tokens in trainers.collect_states(engine.network, plan, missing, out))
        count_texts(progress, len(kept) - len(missing), len(kept), lambda ended: (ended, len(kept)))
    size = plan.num_bytes(range(len(kept)), config.hidden_size)
    print_note(
        f"{number_of(len(kept), 'text')}, {size / 1e6:,.1f} MB in {out}; layers {', '.join(map(str, chosen))}"
        f" ({plan.format.name_layers(chosen)})"
    )


def _read(texts: Path) -> Callable[[Any], list[Any]]:
    """What gives the texts as tokens of an engine's model. Errors: ValueError for a damaged or unknown file."""
    from saltus.training.data.given_texts import read_rows, tokenize_row
    from saltus.training.data.hidden_states import Sample
    from saltus.training.data.teacher_texts import read_teacher_texts
    from saltus.training.run import check_teacher_model

    if texts.is_dir() or texts.suffix == ".gz":
        found = read_teacher_texts(texts)

        def checked(engine: Any) -> list[Any]:
            check_teacher_model(texts, engine.network.model, engine.tokenizer, engine.target.name)
            size = engine.network.model.get_input_embeddings().weight.shape[0]
            if any(token >= size for each in found for token in (*each.prompt, *each.completion)):
                raise ValueError(f"{texts} has tokens that {engine.target.name} has not; let it write the texts")
            return found

        return checked
    rows = read_rows(texts)

    def tokenized(engine: Any) -> list[Any]:
        longest = engine.target.context_length or 1 << 30
        pairs = (tokenize_row(engine, row) for row in rows)
        return [Sample(prompt, completion[:longest], 1.0) for prompt, completion in pairs]

    return tokenized


def _cut(samples: Sequence[Any], length: int | None) -> list[Any]:
    """The texts of at most so many tokens each, without those whose completion is then too short to train on."""
    from dataclasses import replace

    from saltus.training.data.states_for_trainers import MIN_COMPLETION

    cut = [
        each if length is None else replace(each, completion=each.completion[: max(length - len(each.prompt), 0)])
        for each in samples
    ]
    return [each for each in cut if each.prompt and len(each.completion) >= MIN_COMPLETION]
