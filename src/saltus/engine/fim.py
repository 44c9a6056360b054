"""Fill-in-the-middle prompts: causal models that were trained to write what stands between two texts.

A prompt holds the text before the hole and the text after it, each behind a token of its own (Bavarian et al. 2022).
The model continues with the middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from saltus.core.value_types import SettingError
from saltus.engine.encoding import begin_tokens, tokens_inside_text
from saltus.engine.fim_formats import FimFormat, find_fim_format
from saltus.engine.text_bounds import cut_to_context

KNOWN_MODELS = "Qwen2.5-Coder, StarCoder2, CodeLlama, DeepSeek-Coder or Granite Code"
SNIPPET = "\n\n--- snippet ---\n\n"  # before each other file, where a model has no token for files
PROJECT = "project"  # the name of the repository, where a model wants one


@dataclass(frozen=True)
class FimPrompt:
    """The tokens of a prompt."""

    tokens: list[int]
    before: list[int]  # the text before the hole alone
    end_tokens: frozenset[int]


def fim_prompt(
    tokenizer: Any,
    model_name: str,
    before: str,
    after: str,
    files: Sequence[tuple[str, str]] = (),
    most_tokens: int | None = None,
) -> FimPrompt:
    """The prompt for a hole between two texts, after other files (name, text).

    With `most_tokens` the first files are left out where a prompt with them would have more tokens.
    Errors: ValueError of one line.
    """
    markers = find_fim_format(tokenizer)
    if markers is None:
        raise SettingError(
            f"{model_name} writes from left to right and has no fill-in-the-middle tokens; give a code model that has"
            f" them ({KNOWN_MODELS}), or an any-subset model, such as code",
            "suffix",
        )
    vocab = tokenizer.get_vocab()
    begin, prefix = begin_tokens(tokenizer), _encode(tokenizer, before)
    own = [vocab[markers.before], *prefix, vocab[markers.after], *_encode(tokenizer, after), vocab[markers.middle]]
    room = None if most_tokens is None else most_tokens - len(begin) - len(own)
    tokens = [*begin, *_context_tokens(tokenizer, markers, files, room), *own]
    ends = {vocab[name] for name in markers.ends if name in vocab}
    return FimPrompt(
        tokens, prefix, frozenset(ends | {vocab[name] for name in (markers.before, markers.after, markers.middle)})
    )


def _context_tokens(tokenizer: Any, form: FimFormat, files: Sequence[tuple[str, str]], room: int | None) -> list[int]:
    """Other files, as models with tokens for files read a repository, else as snippets (llama.cpp's form).

    With a number of tokens as `room` it is the last files that fit there; none if none does.
    """
    vocab, begin, end = tokenizer.get_vocab(), [], []
    if form.file in vocab:
        end = [vocab[form.file], *_encode(tokenizer, "current\n")]
        if form.repository in vocab:
            begin = [vocab[form.repository], *_encode(tokenizer, f"{PROJECT}\n")]
    left, parts = None if room is None else room - len(begin) - len(end), []
    for name, text in reversed(files):
        if left is not None and left <= 0:
            break
        if form.file in vocab:
            part = [vocab[form.file], *_encode(tokenizer, cut_to_context(f"{name}\n{text}\n", tokenizer, left))]
        else:
            part = _encode(tokenizer, cut_to_context(SNIPPET + text, tokenizer, left))
        if left is not None:
            left -= len(part)
            if left < 0:
                break
        parts.append(part)
    return [*begin, *chain.from_iterable(reversed(parts)), *end] if parts else []


def _encode(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a part of a text: special tokens that are spelled out stay text, and no space is put before it."""
    return tokens_inside_text(tokenizer, text, parse_special=False)
