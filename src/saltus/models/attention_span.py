"""Say how far back the rows of an attention layer see: all of the text, a sliding window or a chunk of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Chunks:
    """A row sees the positions of its own chunk alone, up to its own: chunk i begins at position i · size (Llama 4)."""

    size: int


AttentionSpan = int | Chunks | None
"""A sliding window of so many positions, the row's own included; chunks; None: the whole text."""


def first_visible(positions: Any, span: AttentionSpan) -> Any:
    """The first position that rows at these positions see, in an array or a tensor as they are.

    Errors: ValueError for a window or chunk without a position.
    """
    if span is None:
        return positions * 0
    size = span.size if isinstance(span, Chunks) else span
    if size < 1:
        raise ValueError(f"a layer attends to {size} positions, but must to 1 at least; correct the configuration")
    return positions // size * size if isinstance(span, Chunks) else (positions - size + 1).clip(0)
