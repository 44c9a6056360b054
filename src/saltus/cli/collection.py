"""What the collecting commands share: prompts as token ids, and the progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from saltus.cli import options as o
from saltus.engine.prompts import Prompt


def read_inputs(prompts: Path, limit: int | None) -> list[Prompt]:
    """The prompts of a file; what the model is to write itself is left out. Errors: ValueError for several turns."""
    from saltus.engine.prompts import read_prompts_file

    inputs = read_prompts_file(prompts)[:limit]
    if number := next((number for number, prompt in enumerate(inputs) if len(prompt.turns) > 1), None):
        raise ValueError(f"prompt {number} of {prompts} has several turns; give messages, whose last one is answered")
    asked = [_without_answer(prompt) for prompt in inputs]
    if count := sum(one is not other for one, other in zip(asked, inputs, strict=True)):
        from saltus.cli.answers import print_note

        print_note(
            f"conversations that end with an answer: {count:,}; the model writes its own in its place (to train on the"
            f" given ones: saltus collect data --texts {prompts})"
        )
    return asked


def _without_answer(prompt: Prompt) -> Prompt:
    """A prompt whose messages end before the assistant's last answer, such as those of a data set of conversations."""
    if len(prompt.messages) > 1 and prompt.messages[-1].get("role") == "assistant":
        return replace(prompt, messages=prompt.messages[:-1])
    return prompt


def tokenize_prompts(
    tokenizer: Any, model_name: str, context: int | None, inputs: Sequence[Prompt], file: Path
) -> list[Any]:
    """The token ids of the prompts. Errors: ValueError for one that is longer than the context, if that is known."""
    from saltus.engine.encoding import PromptSettings, encode_prompt
    from saltus.training.data.teacher_texts import TokenizedPrompt

    tokenized = []
    for number, prompt in enumerate(inputs):
        given = prompt.turns[0] if prompt.turns else list(prompt.messages)
        tokens = encode_prompt(tokenizer, given, PromptSettings(), model_name)
        if context is not None and len(tokens) >= context:
            raise ValueError(
                f"prompt {number} of {file} has {len(tokens):,} tokens, but {model_name} reads {context:,};"
                " shorten it or leave it out"
            )
        source = prompt.record.get("source") or prompt.record.get("category") or file.stem
        tokenized.append(TokenizedPrompt(str(source), tuple(tokens)))
    return tokenized


def count_texts(
    progress: Generator[tuple[int, int]], ended: int, total: int, files: Callable[[int], tuple[int, int]]
) -> int:
    """Show the progress of texts, which come with their tokens; how many tokens came.

    At Ctrl-C it says how many `files` are complete after so many texts, and how many there will be.
    """
    from saltus.cli.progress import progress_meter

    tokens, start_time = 0, time.monotonic()
    try:
        with closing(progress), progress_meter(total, "texts", in_logs=True) as show:
            show(ended)
            for texts, new in progress:
                ended, tokens = ended + texts, tokens + new
                show(ended, f"{tokens / (time.monotonic() - start_time):,.0f} tokens/s")
    except KeyboardInterrupt:
        complete, num_files = files(ended)
        raise KeyboardInterrupt(
            f"interrupted; {complete:,} of {num_files:,} files are written, the same command writes the others"
        ) from None
    return tokens


def show_progress(
    progress: Generator[tuple[int, int]], plan: Any, missing: Sequence[int], out: Path, training: str
) -> None:
    """Show the progress, at the end or at Ctrl-C what is written, and at the end the command that trains on it."""
    from saltus.cli.answers import print_note
    from saltus.cli.report import number_of
    from saltus.training.data.teacher_texts import missing_shards

    def files(_: int) -> tuple[int, int]:
        return len(plan.shard_names) - len(missing_shards(out, plan)), len(plan.shard_names)

    ended = plan.num_texts - sum(len(plan.texts_of_shard(number)) for number in missing)
    tokens = count_texts(progress, ended, plan.num_texts, files)
    now = f"{number_of(tokens, 'token')} written now" if missing else "all there before"
    print_note(f"{number_of(plan.num_texts, 'text')} in {out}, {now}")
    print_note(f"  {training}")


def training_command(command: str, teacher: Path, model: str) -> str:
    """The command of `saltus train` that trains on texts of a model."""
    chosen = "" if model == o.DEFAULT_MODEL else f" --model {quote(model)}"
    return f"saltus train {command}{chosen} --teacher {quote(str(teacher))}"
