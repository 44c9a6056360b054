"""Propose what followed last time: copy the continuation of a repeated n-gram."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from saltus.core.canvas import Canvas
from saltus.core.decode import Drafter
from saltus.core.forward import Step
from saltus.core.noise import Noise
from saltus.core.rules import Rule
from saltus.core.sampling import Sampling
from saltus.core.tree import Branch


@dataclass(frozen=True)
class Lookup:
    """Prompt lookup (Saxena 2023) with several branches: the latest continuations of the longest n-grams that recur."""

    longest: int = 4  # tokens of the n-gram looked for, at most
    branches: int = 3  # different continuations offered
    length: int = 12  # tokens of a continuation
    models: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("longest", "branches", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"lookup: {name} is {getattr(self, name)}, but must be 1 or more")

    def drafter(self, noise: Noise, sampling: Sampling, rule: Rule) -> Drafter:
        index = Index(self.longest)

        def offer(canvas: Canvas, last: Step | None, room: int) -> Sequence[Branch]:
            index.read(canvas.decided)
            found = index.continuations(self.branches)
            text = index.tokens
            return [
                Branch(text[at : at + min(self.length, room)], _chances(size, self.length), f"lookup/{min(size, 3)}")
                for at, size in found
            ]

        return offer


def _chances(size: int, length: int) -> list[float]:
    """A first guess, calibrated as the text grows: longer repeats are right more often, and go on being right."""
    first = (0.2, 0.45, 0.6, 0.7)[min(size, 4) - 1]
    return [first] + [min(first + 0.05 * (1 + i), 0.9) for i in range(length - 1)]


class Index:
    """Where each n-gram of a growing text was continued, latest last."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.tokens: list[int] = []
        self.places: dict[tuple[int, ...], list[int]] = {}

    def read(self, text: np.ndarray) -> None:
        """Index what is new; the text only grows."""
        for token in text[len(self.tokens) :].tolist():
            end = len(self.tokens)
            for size in range(1, min(self.longest, end) + 1):
                self.places.setdefault(tuple(self.tokens[end - size :]), []).append(end)
            self.tokens.append(token)

    def continuations(self, count: int) -> list[tuple[int, int]]:
        """(where it goes on, length of the repeat): longest repeats first, then the latest, first tokens differing."""
        found: dict[int, tuple[int, int]] = {}
        for size in range(min(self.longest, len(self.tokens)), 0, -1):
            for at in reversed(self.places.get(tuple(self.tokens[-size:]), ())):
                if len(found) == count:
                    return list(found.values())
                found.setdefault(self.tokens[at], (at, size))
        return list(found.values())
