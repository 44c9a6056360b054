"""Read a text with holes, `The [[8]] sat on the [[…]].`, and put together what filled them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from saltus.core.canvas import HOLE, Canvas, infilling
from saltus.text import Detokenizer

MARK = re.compile(r"\[\[\s*(\d+|…|\.\.\.)\s*\]\]")
OPEN = 24  # tokens that a hole of unknown length may have


@dataclass(frozen=True)
class Template:
    """Pieces of text with a hole between each two: its length in tokens, or None where the model ends it."""

    pieces: tuple[str, ...]
    holes: tuple[int | None, ...]

    def __post_init__(self) -> None:
        assert len(self.pieces) == len(self.holes) + 1
        if not self.holes:
            raise ValueError("there is no hole; write [[8]] for one of 8 tokens, or [[…]] for one that the model ends")
        if any(hole is not None and hole < 1 for hole in self.holes):
            raise ValueError("a hole has length 0; give it one or more tokens, or take it out")


def parsed(text: str) -> Template:
    """A text with marks. Errors: ValueError where there is none, or one is of length 0."""
    parts = MARK.split(text)
    holes = tuple(int(mark) if mark.isdigit() else None for mark in parts[1::2])
    return Template(tuple(parts[::2]), holes)


def as_template(text: str | Template, suffix: str | None = None) -> Template:
    """Of a text with marks, or of what stands before and behind a hole. Errors: ValueError as `parsed`."""
    if suffix is None:
        return text if isinstance(text, Template) else parsed(text)
    if isinstance(text, Template):
        raise ValueError("a template has its holes; leave out suffix, or give the text before the hole as a str")
    return Template((text, suffix), (None,))


@dataclass(frozen=True)
class Layout:
    """A template as tokens on a canvas, and where its holes stand."""

    canvas: Canvas
    spans: tuple[range, ...]  # positions of each hole
    pieces: tuple[str, ...]  # between them

    def text(self, found: Sequence[str]) -> str:
        """All of it, with what was found for the holes."""
        return "".join(part for pair in zip(self.pieces, (*found, ""), strict=True) for part in pair)


def laid_out(
    template: Template, tokenizer: Any, most: int = OPEN, context: int | None = None, as_is: bool = False
) -> Layout:
    """Between the tokens that begin and end a text. Errors: ValueError for a text longer than the context.

    A space before a hole becomes part of it, since words carry the space before them, but for pieces `as_is`.
    """
    pieces = [*(template.pieces if as_is else map(_without_space, template.pieces[:-1])), template.pieces[-1]]
    pieces = pieces[: len(template.pieces)]
    holes = sum(most if hole is None else hole for hole in template.holes)
    if context is not None and holes >= context:
        raise ValueError(f"the holes have {holes:,} tokens, but the model reads at most {context:,}; make them shorter")
    tokens: list[int] = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    spans = []
    for piece, hole in zip(pieces, (*template.holes, 0), strict=True):
        tokens += tokenizer(piece, add_special_tokens=False).input_ids if piece else []
        size = most if hole is None else hole
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
    return Layout(infilling(np.array(tokens, dtype=np.int64)), tuple(spans), tuple(pieces))


def blank_rules(
    layout: Layout, holes: Sequence[int | None], blank: int
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int, int], ...]]:
    """Where a blank ends a hole, and where it may not be: `banned_at` and `closing` of `Sampling`."""
    first, banned, closing = 0, [], []
    for hole, span in zip(holes, layout.spans, strict=True):
        indices = range(first, first := first + len(span))
        if hole is None:
            closing.append((blank, indices[0], indices[-1]))
        else:
            banned += [(index, blank) for index in indices]
    return tuple(banned), tuple(closing)


def fillings(layout: Layout, tokens: Sequence[int], tokenizer: Any) -> list[list[str]]:
    """For each hole the text that each of its tokens completes, of the filled text; special tokens say nothing."""
    found = []
    for span in layout.spans:
        detokenizer = Detokenizer(tokenizer, tokens[: span.start])
        found.append([detokenizer.read(token) for token in tokens[span.start : span.stop]])
    return found


def _without_space(piece: str) -> str:
    """Before a hole; white space of more than a space is left alone, as is one that begins a line."""
    return piece[:-1] if piece.endswith(" ") and piece[-2:-1].strip() else piece
