"""Fill-in-the-middle prompts: causal models that were trained to write what stands between two texts.

A prompt holds the text before the hole and the text after it, each behind a token of its own (Bavarian et al. 2022).
The model continues with the middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from saltus.engine.encoding import begin_tokens, tokens_inside_text
from saltus.engine.fim_formats import FimFormat, find_fim_format

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
    tokenizer: Any, model_name: str, before: str, after: str, files: Sequence[tuple[str, str]] = ()
) -> FimPrompt:
    """The prompt for a hole between two texts, after other files (name, text). Errors: ValueError of one line."""
    markers = find_fim_format(tokenizer)
    if markers is None:
        raise ValueError(
            f"{model_name} writes from left to right and has no fill-in-the-middle tokens; give a code model that has"
            f" them ({KNOWN_MODELS}), or an any-subset model, such as code"
        )
    vocab = tokenizer.get_vocab()
    tokens = [*begin_tokens(tokenizer), *_context_tokens(tokenizer, markers, files)]
    prefix = _encode(tokenizer, before)
    tokens += [vocab[markers.before], *prefix, vocab[markers.after], *_encode(tokenizer, after), vocab[markers.middle]]
    ends = {vocab[name] for name in markers.ends if name in vocab}
    return FimPrompt(
        tokens, prefix, frozenset(ends | {vocab[name] for name in (markers.before, markers.after, markers.middle)})
    )


def _context_tokens(tokenizer: Any, form: FimFormat, files: Sequence[tuple[str, str]]) -> list[int]:
    """Other files, as models with tokens for files read a repository, else as snippets (llama.cpp's form)."""
    vocab, tokens = tokenizer.get_vocab(), []
    if files and form.repository in vocab and form.file in vocab:
        tokens += [vocab[form.repository], *_encode(tokenizer, f"{PROJECT}\n")]
    for name, text in files:
        if form.file in vocab:
            tokens += [vocab[form.file], *_encode(tokenizer, f"{name}\n{text}\n")]
        else:
            tokens += _encode(tokenizer, SNIPPET + text)
    if files and form.file in vocab:
        tokens += [vocab[form.file], *_encode(tokenizer, "current\n")]
    return tokens


def _encode(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a part of a text: special tokens that are spelled out stay text, and no space is put before it."""
    return tokens_inside_text(tokenizer, text, parse_special=False)
