"""Parse a text with holes, `The [[8]] sat on the [[…]].`, and lay it out as tokens on a canvas."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from saltus.core.canvas import HOLE, Canvas, infilling
from saltus.engine.text_bounds import PromptTooLongError

HOLE_PATTERN = re.compile(r"\[\[\s*(\d+|…|\.\.\.)\s*\]\]")
DEFAULT_OPEN_TOKENS = 24  # tokens that a hole of unknown length may have
DEFAULT_MIDDLE_TOKENS = 128  # the same of a causal model, which writes until it ends the hole


@dataclass(frozen=True)
class InfillTemplate:
    """Pieces of text with a hole between each two; a hole's length is in tokens, None if the model ends it."""

    pieces: tuple[str, ...]
    hole_lengths: tuple[int | None, ...]

    def __post_init__(self) -> None:
        assert len(self.pieces) == len(self.hole_lengths) + 1
        if not self.hole_lengths:
            raise ValueError("there is no hole; write [[8]] for one of 8 tokens, or [[…]] for one that the model ends")
        if any(hole is not None and hole < 1 for hole in self.hole_lengths):
            raise ValueError("a hole has length 0; give it one or more tokens, or take it out")


def parse_template(text: str) -> InfillTemplate:
    """The template of a text with marks. Errors: ValueError if there is no mark, or one of length 0."""
    parts = HOLE_PATTERN.split(text)
    holes = tuple(int(mark) if mark.isdigit() else None for mark in parts[1::2])
    return InfillTemplate(tuple(parts[::2]), holes)


def as_template(text: str | InfillTemplate, suffix: str | None = None) -> InfillTemplate:
    """The template of a text with marks, or of the two texts around one open hole. Errors: as `parse_template`."""
    if suffix is None:
        return text if isinstance(text, InfillTemplate) else parse_template(text)
    if isinstance(text, InfillTemplate):
        raise ValueError("a template has its holes; leave out suffix, or give the text before the hole as a str")
    return InfillTemplate((text, suffix), (None,))


@dataclass(frozen=True)
class InfillLayout:
    """A template as tokens on a canvas."""

    canvas: Canvas
    hole_spans: tuple[range, ...]  # positions of each hole
    pieces: tuple[str, ...]  # the given texts around and between the holes

    def text(self, fillings: Sequence[str]) -> str:
        """The whole text, given the text of each hole."""
        return "".join(part for pair in zip(self.pieces, (*fillings, ""), strict=True) for part in pair)


def tokenize_template(
    template: InfillTemplate,
    tokenizer: Any,
    max_open_tokens: int = DEFAULT_OPEN_TOKENS,
    context: int | None = None,
    verbatim: bool = False,
) -> InfillLayout:
    """Lay a template out between the tokens that begin and end a text. Errors: PromptTooLongError, ValueError.

    Unless `verbatim`, one space before a hole is removed: tokens of words include the space before them.
    """
    *before, end = template.pieces
    pieces = [*(before if verbatim else map(_strip_one_space, before)), end]
    holes = sum(max_open_tokens if hole is None else hole for hole in template.hole_lengths)
    if context is not None and holes >= context:
        raise PromptTooLongError(
            f"the holes have {holes:,} tokens, but the model reads at most {context:,}; make them shorter"
        )
    tokens: list[int] = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    spans = []
    for piece, hole in zip(pieces, (*template.hole_lengths, 0), strict=True):
        tokens += tokenizer(piece, add_special_tokens=False).input_ids if piece else []
        size = max_open_tokens if hole is None else hole
        if size:
            spans.append(range(len(tokens), len(tokens) + size))
            tokens += [HOLE] * size
    tokens += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if context is not None and len(tokens) > context:
        raise PromptTooLongError(
            f"the text has {len(tokens):,} tokens with its holes, but the model reads at most {context:,};"
            " shorten it, or fill it part by part"
        )
    if not any(token != HOLE for token in tokens):
        raise ValueError("the text is only holes, and the model has no token that begins one; write a word")
    return InfillLayout(infilling(np.array(tokens, dtype=np.int64)), tuple(spans), tuple(pieces))


def hole_end_rules(
    layout: InfillLayout, hole_lengths: Sequence[int | None], end_token: int
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int, int], ...]]:
    """Sampling's `banned_at_index` and `hole_end_tokens`: the end token ends open holes and is banned in the others."""
    first, banned, closing = 0, [], []
    for hole, span in zip(hole_lengths, layout.hole_spans, strict=True):
        indices = range(first, first := first + len(span))
        if hole is None:
            closing.append((end_token, indices[0], indices[-1]))
        else:
            banned += [(index, end_token) for index in indices]
    return tuple(banned), tuple(closing)


def _strip_one_space(piece: str) -> str:
    """Remove a single space at the end; longer white space, and a space that begins a line, stay."""
    return piece[:-1] if piece.endswith(" ") and piece[-2:-1].strip() else piece
