"""Choose which tokens of a training text are holes, and the order in which they are decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

HoleOrder = Literal["lattice", "any"]
"""Holes are decided from left to right (Eq. 4), or in a random permutation (the paper's ablation)."""

MaskRatio = Literal["few", "narrow", "wide", "paper", "paper-wide", "paper-code", "paper-single-line"]


@dataclass(frozen=True)
class MaskRatioRange:
    """The fraction of a text that is holes: `initial` at step 0, then growing linearly to the range `low` … `high`."""

    low: float
    high: float
    initial: float = 0.15
    warm_up: float = 0.2  # fraction of the steps in which it grows


MASK_RATIOS: dict[MaskRatio, MaskRatioRange] = {
    "few": MaskRatioRange(0.05, 0.6),
    "narrow": MaskRatioRange(0.9, 0.99),
    "wide": MaskRatioRange(0.05, 0.99),
    "paper": MaskRatioRange(0.9, 0.99, warm_up=5 / 75),  # ASSD, D.3: text, 5,000 of 75,000 steps
    "paper-wide": MaskRatioRange(0.15, 0.99, warm_up=5 / 75),  # F.2: prompts of 1 % to 85 %
    "paper-code": MaskRatioRange(0.15, 0.99, initial=0.05, warm_up=20 / 75),  # D.7: code, 20,000 of 75,000 steps
    # the released script that trains on for single lines: 2,500 of 468,750 steps
    "paper-single-line": MaskRatioRange(0.05, 0.25, initial=0.01, warm_up=2500 / 468_750),
}

MAX_EXTRA_BLANKS = 24  # a hole of n tokens gets at most 24 + n blanks after them


@dataclass(frozen=True)
class HoleSettings:
    """Which tokens of a text are holes: how many, in spans or scattered, and with blanks after them or not."""

    mask_ratio: MaskRatio = "wide"
    warm_up_fraction: float | None = None  # fraction of the steps in which the holes grow; None: that of the ratio
    span_probability: float = 0.5  # of a text whose holes are a few spans, as users' are; else they are scattered
    order: HoleOrder = "lattice"
    # of blanks at the ends of a text's spans, as in holes that are too long; in the two halves of the steps
    blank_probability: tuple[float, float] = (0.4, 0.9)
    blank_token: int | None = None
    newline_token: int | None = None  # if given, spans are whole lines, as in code

    def hole_fractions(self, count: int, progress: float, generator: np.random.Generator) -> Float[np.ndarray, "texts"]:
        """The fraction of each text: evenly spread over the range in every batch, in random order."""
        ratio = MASK_RATIOS[self.mask_ratio]
        warm_up = ratio.warm_up if self.warm_up_fraction is None else self.warm_up_fraction
        warm = min(progress / warm_up, 1.0) if warm_up else 1.0
        low, high = (ratio.initial + (end - ratio.initial) * warm for end in (ratio.low, ratio.high))
        places = (generator.random() + np.arange(count)) / count % 1
        return generator.permutation(low + (high - low) * places)

    def place_holes(
        self,
        text: Int[np.ndarray, "length"],
        fraction: float,
        generator: np.random.Generator,
        blank_probability: float = 0.0,
    ) -> tuple[Int[np.ndarray, "with_blanks"], Bool[np.ndarray, "with_blanks"]]:
        """The text, perhaps with blanks, and True for each hole. The first and the last token are never holes."""
        holes = np.zeros(len(text), dtype=bool)
        if generator.random() >= self.span_probability:
            holes[1:-1] = random_holes(len(text) - 2, fraction, generator)
            return text, holes
        inner = text[1:-1]
        if self.newline_token is None or not (inner == self.newline_token).any():
            holes[1:-1] = span_holes(len(inner), fraction, generator)
        else:
            ends = inner == self.newline_token
            lines = np.cumsum(ends) - ends  # the number of each token's line
            chosen = np.append(span_holes(int(lines[-1]) + 1, fraction, generator), False)
            holes[1:-1] = chosen[lines] & ~(ends & ~chosen[lines + 1])  # the end of a span's last line is given
            holes = holes if holes.any() else np.arange(len(text)) == 1
        if not blank_probability or self.blank_token is None or generator.random() >= blank_probability:
            return text, holes
        starts = np.flatnonzero(holes[1:] & ~holes[:-1]) + 1
        stops = np.flatnonzero(holes[:-1] & ~holes[1:]) + 1
        blanks = generator.integers(0, MAX_EXTRA_BLANKS + 1 + (stops - starts))
        places = np.repeat(stops, blanks)
        return np.insert(text, places, self.blank_token), np.insert(holes, places, True)

    def decoding_ranks(
        self, holes: Bool[np.ndarray, "length"], generator: np.random.Generator
    ) -> Int[np.ndarray, "length"]:
        """The order in which tokens are decided: 0 for given tokens, then 1, 2, …"""
        places = np.flatnonzero(holes)
        order = places if self.order == "lattice" else generator.permutation(places)
        ranks = np.zeros(len(holes), dtype=np.int64)
        ranks[order] = 1 + np.arange(len(order))
        return ranks


def random_holes(length: int, fraction: float, generator: np.random.Generator) -> Bool[np.ndarray, "length"]:
    """Scattered holes, this fraction of the positions; one at least."""
    holes = np.zeros(length, dtype=bool)
    holes[generator.permutation(length)[: _num_holes(length, fraction)]] = True
    return holes


def span_holes(length: int, fraction: float, generator: np.random.Generator) -> Bool[np.ndarray, "length"]:
    """Holes in one to four spans, this fraction of the positions; one at least."""
    count = _num_holes(length, fraction)
    holes = np.zeros(length, dtype=bool)
    pieces = int(generator.integers(1, min(4, count) + 1))
    sizes = np.diff([0, *np.sort(generator.permutation(count - 1)[: pieces - 1] + 1), count])
    gaps = np.diff([0, *np.sort(generator.integers(0, length - count + 1, size=pieces)), length - count])
    at = 0
    for size, gap in zip(sizes, gaps, strict=False):
        at += int(gap)
        holes[at : at + size] = True
        at += int(size)
    return holes


def _num_holes(length: int, fraction: float) -> int:
    return min(max(round(fraction * length), 1), length)
