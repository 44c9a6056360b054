"""The fill-in-the-middle tokens of families of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FimFormat:
    """The tokens of a family of models, as its model cards give them."""

    before: str  # stands before the text before the hole
    after: str  # stands before the text after the hole
    middle: str  # the model continues behind it
    ends: tuple[str, ...] = ()  # tokens that end the middle, besides the model's end tokens
    file: str = ""  # stands before a file's name
    repository: str = ""  # stands before the repository's name

    @property
    def names(self) -> frozenset[str]:
        """Of all its tokens."""
        return frozenset({self.before, self.after, self.middle, *self.ends, self.file, self.repository} - {""})


FORMATS = (
    FimFormat(  # Qwen2.5-Coder, Granite 4, CodeGemma (without the last two)
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>",
        ("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|file_separator|>", "<|repo_name|>", "<|cursor|>"),
        "<|file_sep|>", "<|repo_name|>",
    ),
    FimFormat(  # StarCoder, StarCoder2, Granite Code
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>",
        ("<|endoftext|>", "<fim_pad>", "<file_sep>", "<repo_name>", "<filename>", "<reponame>"),
        "<file_sep>", "<repo_name>",
    ),
    FimFormat("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),  # CodeLlama
    FimFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ("<｜end▁of▁sentence｜>",)),  # DeepSeek-Coder
)  # fmt: skip


def find_fim_format(tokenizer: Any) -> FimFormat | None:
    """The format whose tokens the tokenizer has; None if it has none."""
    return next(
        (
            format_ for format_ in FORMATS
            if all(_has(tokenizer, name) for name in (format_.before, format_.after, format_.middle))
        ), None,
    )  # fmt: skip


def _has(tokenizer: Any, name: str) -> bool:
    """True if a token is called so; a dict of all tokens takes a tenth of a second to make."""
    token = tokenizer.convert_tokens_to_ids(name)  # where there is none, that of unknown words, if there is one
    return token is not None and tokenizer.convert_ids_to_tokens(token) == name
