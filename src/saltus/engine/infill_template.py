"""Read a text with holes, `The [[8]] sat on the [[…]].`, and put together what filled them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from saltus.core.canvas import HOLE, Canvas, infilling
from saltus.engine.detokenizer import Detokenizer

HOLE_PATTERN = re.compile(r"\[\[\s*(\d+|…|\.\.\.)\s*\]\]")
DEFAULT_OPEN_TOKENS = 24  # tokens that a hole of unknown length may have


@dataclass(frozen=True)
class InfillTemplate:
    """Pieces of text with a hole between each two: its length in tokens, or None where the model ends it."""

    pieces: tuple[str, ...]
    hole_lengths: tuple[int | None, ...]

    def __post_init__(self) -> None:
        assert len(self.pieces) == len(self.hole_lengths) + 1
        if not self.hole_lengths:
            raise ValueError("there is no hole; write [[8]] for one of 8 tokens, or [[…]] for one that the model ends")
        if any(hole is not None and hole < 1 for hole in self.hole_lengths):
            raise ValueError("a hole has length 0; give it one or more tokens, or take it out")


def parse_template(text: str) -> InfillTemplate:
    """A text with marks. Errors: ValueError where there is none, or one is of length 0."""
    parts = HOLE_PATTERN.split(text)
    holes = tuple(int(mark) if mark.isdigit() else None for mark in parts[1::2])
    return InfillTemplate(tuple(parts[::2]), holes)


def as_template(text: str | InfillTemplate, suffix: str | None = None) -> InfillTemplate:
    """Of a text with marks, or of what stands before and behind a hole. Errors: ValueError as `parsed`."""
    if suffix is None:
        return text if isinstance(text, InfillTemplate) else parse_template(text)
    if isinstance(text, InfillTemplate):
        raise ValueError("a template has its holes; leave out suffix, or give the text before the hole as a str")
    return InfillTemplate((text, suffix), (None,))


@dataclass(frozen=True)
class InfillLayout:
    """A template as tokens on a canvas, and where its holes stand."""

    canvas: Canvas
    hole_spans: tuple[range, ...]  # positions of each hole
    pieces: tuple[str, ...]  # between them

    def text(self, fillings: Sequence[str]) -> str:
        """All of it, with what was found for the holes."""
        return "".join(part for pair in zip(self.pieces, (*fillings, ""), strict=True) for part in pair)


def tokenize_template(
    template: InfillTemplate,
    tokenizer: Any,
    max_open_tokens: int = DEFAULT_OPEN_TOKENS,
    context: int | None = None,
    verbatim: bool = False,
) -> InfillLayout:
    """Between the tokens that begin and end a text. Errors: ValueError for a text longer than the context.

    A space before a hole becomes part of it, since words carry the space before them, but for pieces `as_is`.
    """
    pieces = [*(template.pieces if verbatim else map(_strip_one_space, template.pieces[:-1])), template.pieces[-1]]
    pieces = pieces[: len(template.pieces)]
    holes = sum(max_open_tokens if hole is None else hole for hole in template.hole_lengths)
    if context is not None and holes >= context:
        raise ValueError(f"the holes have {holes:,} tokens, but the model reads at most {context:,}; make them shorter")
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
        raise ValueError(
            f"the text has {len(tokens):,} tokens with its holes, but the model reads at most {context:,};"
            " shorten it, or fill it part by part"
        )
    if not any(token != HOLE for token in tokens):
        raise ValueError("the text is only holes, and the model has no token that begins one; write a word")
    return InfillLayout(infilling(np.array(tokens, dtype=np.int64)), tuple(spans), tuple(pieces))


def hole_end_rules(
    layout: InfillLayout, hole_lengths: Sequence[int | None], end_token: int
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int, int], ...]]:
    """Where a blank ends a hole, and where it may not be: `banned_at` and `closing` of `Sampling`."""
    first, banned, closing = 0, [], []
    for hole, span in zip(hole_lengths, layout.hole_spans, strict=True):
        indices = range(first, first := first + len(span))
        if hole is None:
            closing.append((end_token, indices[0], indices[-1]))
        else:
            banned += [(index, end_token) for index in indices]
    return tuple(banned), tuple(closing)


def token_texts_of_holes(layout: InfillLayout, tokens: Sequence[int], tokenizer: Any) -> list[list[str]]:
    """For each hole the text that each of its tokens completes, of the filled text; special tokens say nothing."""
    found = []
    for span in layout.hole_spans:
        detokenizer = Detokenizer(tokenizer, tokens[: span.start])
        found.append([detokenizer.add(token) for token in tokens[span.start : span.stop]])
    return found


def _strip_one_space(piece: str) -> str:
    """Before a hole; white space of more than a space is left alone, as is one that begins a line."""
    return piece[:-1] if piece.endswith(" ") and piece[-2:-1].strip() else piece
