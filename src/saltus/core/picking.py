"""The distribution of one token: pick a token from it by a uniform (inverse CDF), and invert the pick."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

BLOCK = 128  # tokens whose cumulative sums are computed together, on demand
LIKELY_THRESHOLD = 2.0**-10  # times the greatest probability: tokens above it are picked in order of probability
TINY = 2.0**-960  # cumulative weights below it count as zero: u · total keeps 53 bits, and pick can be inverted
Coupling = Literal["probability", "token-order", "gumbel"]
"""Which token the random numbers of a position pick: the inverse CDF, with tokens by falling probability or by id as in
PTP's Eq. 2; or argmax log P(t) + G(t) with Gumbel noise G for each token."""
DEFAULT_COUPLING: Coupling = "gumbel"


@dataclass(frozen=True, eq=False)
class Distribution:
    """The distribution of one token, as unnormalised weights in token order.

    `tokens` are the ascending ids that the weights belong to, None for the whole vocabulary. Under the coupling
    `probability` tokens are *picked* in another order: the likely ones by falling weight, then the others by id. So a
    small uniform picks the likeliest token, whatever its id.
    """

    tokens: np.ndarray | None  # [n] int64
    weights: np.ndarray  # [n] float64, not negative; [vocabulary] if tokens is None
    coupling: Coupling = "probability"  # what `pick_token` uses

    @cached_property
    def head(self) -> np.ndarray:
        """Indices of the likely tokens, by falling weight; among equal weights the lower id first. None by id alone."""
        if self.coupling == "token-order":
            return np.empty(0, dtype=np.int64)
        likely = np.flatnonzero(self.weights >= max(float(self.weights.max()) * LIKELY_THRESHOLD, 5e-324))
        return likely[np.argsort(-self.weights[likely], kind="stable")]

    @cached_property
    def head_sums(self) -> np.ndarray:
        """Inclusive cumulative sums of the head, in float64; [0] without a head."""
        sums = np.cumsum(self.weights[self.head], dtype=np.float64)
        return sums if len(sums) else np.zeros(1)

    @cached_property
    def rest(self) -> np.ndarray:
        """The weights of the other tokens, in token order; 0 for the head."""
        rest = self.weights.copy()
        rest[self.head] = 0
        return rest

    @cached_property
    def borders(self) -> np.ndarray:
        """Cumulative sums in float64 at the borders of the rest's blocks: [all of the head, first block, …, total]."""
        sums = np.add.reduceat(self.rest, np.arange(0, len(self.rest), BLOCK), dtype=np.float64)
        return np.cumsum(np.concatenate([self.head_sums[-1:], sums]))

    @property
    def total(self) -> float:
        """The sum of all weights, which need not be 1."""
        return float(self.borders[-1])

    @cached_property
    def mass(self) -> float:
        """`total` up to rounding, cheaper: no order of the tokens is needed."""
        return float(self.weights.sum())

    @property
    def peak(self) -> float:
        """Probability of the likeliest token."""
        return float(self.weights.max()) / self.mass

    def block(self, number: int) -> np.ndarray:
        """Inclusive cumulative sums c of one block of the rest: u · total in [c[i − 1], c[i]) picks its token i."""
        rest = self.rest[number * BLOCK : (number + 1) * BLOCK]
        return _running(rest, self.borders[number], self.borders[number + 1])


def _running(weights: np.ndarray, low, high) -> np.ndarray:
    """Cumulative sums from `low`; the last token with weight ends exactly at `high`, despite rounding."""
    sums = np.cumsum(weights, axis=-1, dtype=np.float64)
    return np.where(sums == sums[..., -1:], high, np.minimum(sums + low, high))


def one_hot(token: int) -> Distribution:
    """The distribution with all mass on one token, as for greedy decoding and forced tokens."""
    return Distribution(np.array([token], dtype=np.int64), np.ones(1))


def pick(u: float, distribution: Distribution) -> int:
    """The first token whose cumulative probability exceeds u in [0, 1); never one of probability zero.

    PTP, Eq. 2: min {j: F_j > u}, F_j = Σ P_l over the token ids l = 1…j. That is the coupling `token-order`. Under
    `probability`, which is ours, the sum runs in the order of `Distribution`: likely tokens first.
    """
    assert distribution.coupling != "gumbel"
    if not 0 <= u < 1:
        raise ValueError(f"pick was given u = {u}, but a uniform lies in [0, 1)")
    x = u * distribution.total
    x = x if x >= TINY else 0.0
    if x < distribution.head_sums[-1]:
        place = int(distribution.head[np.searchsorted(distribution.head_sums, x, side="right")])
    else:
        block = int(np.searchsorted(distribution.borders[1:], x, side="right"))
        place = block * BLOCK + int(np.searchsorted(distribution.block(block), x, side="right"))
    return place if distribution.tokens is None else int(distribution.tokens[place])


def sample(u: float, distribution: Distribution) -> int:
    """Sample with a uniform that is used for nothing else: faster than `pick`, since any order of tokens will do."""
    starts = np.arange(0, len(distribution.weights), BLOCK)
    borders = np.cumsum(np.add.reduceat(distribution.weights, starts))
    block, x = _search_sums(borders, u * borders[-1])
    start = block * BLOCK
    place, _ = _search_sums(np.cumsum(distribution.weights[start : start + BLOCK]), x)
    return start + place if distribution.tokens is None else int(distribution.tokens[start + place])


def _search_sums(sums: np.ndarray, x: float) -> tuple[int, float]:
    """The place of x among cumulative sums (the last with weight if x lies beyond), and x's offset in it."""
    place = int(np.searchsorted(sums, x, side="right"))
    if place == len(sums):
        place = int(np.searchsorted(sums, sums[-1]))
    return place, x - float(sums[place - 1]) if place else x


def uniform_interval(token: int, distribution: Distribution) -> tuple[float, float]:
    """The inverse of `pick`: exactly the u in [low, high) pick the token (none if low = high)."""
    assert distribution.coupling != "gumbel"
    place = token if distribution.tokens is None else int(np.searchsorted(distribution.tokens, token))
    if place >= len(distribution.weights):
        return 1.0, 1.0
    known = distribution.tokens is None or distribution.tokens[place] == token
    if known and len(ranks := np.flatnonzero(distribution.head == place)):
        rank = int(ranks[0])
        low, high = (float(distribution.head_sums[rank - 1]) if rank else 0.0), float(distribution.head_sums[rank])
    else:
        block, offset = divmod(place, BLOCK)
        running = distribution.block(block)
        low, high = float(running[offset - 1] if offset else distribution.borders[block]), float(running[offset])
    low = _least_uniform(low, distribution.total)
    return (low, _least_uniform(high, distribution.total)) if known else (low, low)


def _least_uniform(x: float, total: float) -> float:
    """The least u ≤ 1 with u · total ≥ x in float64 arithmetic; it is within a few steps of the quotient."""
    if x <= 0:
        return 0.0
    if x >= total:
        return 1.0
    x = max(x, TINY)
    u = x / total
    while math.nextafter(u, 0) * total >= x:
        u = math.nextafter(u, 0)
    while u * total < x:
        u = math.nextafter(u, 1)
    return u


def probability(token: int, distribution: Distribution) -> float:
    """The probability of one token."""
    return float(_weights_at(np.array([token]), distribution)[0]) / distribution.mass


def probabilities(distribution: Distribution, vocab: int) -> np.ndarray:
    """The probabilities of all tokens, float64 [vocab]."""
    dense = np.zeros(vocab)
    dense[slice(len(distribution.weights)) if distribution.tokens is None else distribution.tokens] = (
        distribution.weights / distribution.mass
    )
    return dense


def residual(target: Distribution, draft: Distribution) -> Distribution:
    """The distribution to sample from after a rejection: (P − Q)₊, unnormalised (Leviathan et al. 2023, Alg. 1).

    If rounding leaves no excess, P equals Q and a rejection has probability zero; the result is then P.
    """
    if target.tokens is None and draft.tokens is None and len(target.weights) == len(draft.weights):
        likely = draft.weights
    else:
        tokens = np.arange(len(target.weights)) if target.tokens is None else target.tokens
        likely = _weights_at(tokens, draft)
    excess = np.maximum(target.weights - likely * (target.mass / draft.mass), 0)
    return Distribution(target.tokens, excess) if excess.any() else target


def _weights_at(tokens: np.ndarray, distribution: Distribution) -> np.ndarray:
    """The weights of ascending tokens, unnormalised; 0 for tokens that the distribution does not contain."""
    last = len(distribution.weights) - 1
    if distribution.tokens is None and tokens[-1] <= last:
        return distribution.weights[tokens]
    places = np.minimum(tokens if distribution.tokens is None else np.searchsorted(distribution.tokens, tokens), last)
    tokens_there = places if distribution.tokens is None else distribution.tokens[places]
    return np.where(tokens_there == tokens, distribution.weights[places], 0)
