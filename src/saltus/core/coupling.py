"""Pick a token with the random numbers of its position: one function for every method, under each coupling.

A coupling says what a position's random numbers mean. It is chosen once for a text (`Sampling.coupling`) and decides
how often two similar distributions pick the same token: the draft model's and the target's, above all.
"""

from __future__ import annotations

import math
from bisect import insort

import numpy as np
from torch import Tensor

from saltus.core.noise import GROUP_SIZE, GROUP_STRIDE, Noise, TokenNoise, first_tokens, groups_of
from saltus.core.picking import Distribution, pick, probability
from saltus.kernels import native

SLACK = 1 - 2.0**-40  # of bounds, against rounding
# Of the Gumbel noise by which a draft model's log-probabilities differ from the target's: of a model that has read the
# tokens before, and of one that predicts several tokens at once. 2 fits 2,000 queries of the shipped drafter best.
SEQUENTIAL_ERROR, PARALLEL_ERROR = 1.0, 2.0
CONSIDERED_RATIO = 0.02  # of the best value: below it a token hardly counts for the estimates


def pick_token(distribution: Distribution, noise: Noise, stream: str, position: int | np.integer) -> int:
    """The token that the random numbers of `stream` at `position` pick from a distribution, by its coupling."""
    if len(distribution.weights) == 1:
        return 0 if distribution.tokens is None else int(distribution.tokens[0])
    if distribution.coupling == "gumbel":
        return best_tokens(distribution, noise, stream, position)[0][0]
    return pick(noise.uniform(stream, position), distribution)


def gumbel_max_token(logits: Tensor, temperature: float, noise: Noise, stream: str, position: int) -> int | None:
    """`pick_token` of the softmax of a row of logits with Gumbel noise, by a compiled kernel; None if it cannot tell.

    So it is without a kernel, where rounding may decide between two tokens, and for logits that are not finite.
    """
    kernel = native.kernel("gumbel_max", logits.dtype, logits.device)
    if kernel is None or not logits.is_contiguous():
        return None
    token = kernel(logits.data_ptr(), len(logits), temperature, *noise.token_keys(stream, position).tolist())
    return token if token >= 0 else None


def draft_tokens(
    distribution: Distribution,
    noise: Noise,
    stream: str,
    position: int | np.integer,
    count: int = 1,
    error: float = SEQUENTIAL_ERROR,
) -> list[tuple[int, float]]:
    """The tokens that a draft distribution suggests for a position, best first, with estimates of their acceptance.

    By inverse CDF this is one token, picked as the target's will be, with its probability. With Gumbel noise the target
    picks the best of its own values z = log P + G. Where its log P differs from the draft's by Gumbel noise of scale
    `error`, token t is the best with probability exp(z(t)/error) / Σ exp(z/error), z being the draft's values. A model
    that has read the tokens before is right at least as often as its probability says.
    """
    if distribution.coupling != "gumbel" or len(distribution.weights) == 1:
        token = pick_token(distribution, noise, stream, position)
        return [(token, probability(token, distribution))]
    search = _search_gumbel_max(distribution, noise, stream, position, count, CONSIDERED_RATIO)
    greatest = -search.best[0][0]
    total = max(float(((search.upper / greatest) ** (1 / error)).sum()), 1.0)
    estimates = [(token, (-value / greatest) ** (1 / error) / total) for value, token in search.best]
    if error == PARALLEL_ERROR:
        return estimates
    return [(token, max(estimate, probability(token, distribution))) for token, estimate in estimates]


def favoured(
    tokens: np.ndarray, values: np.ndarray, count: int, error: float = PARALLEL_ERROR
) -> list[tuple[int, float]]:
    """The `count` tokens with the greatest values log P + G, with the estimates of `draft_tokens`; for few tokens."""
    best = largest(values, count)
    weights = np.exp((values - values[best[0]]) * (1 / error))
    return list(zip(tokens[best].tolist(), (weights[best] / weights.sum()).tolist(), strict=True))


def largest(row: np.ndarray, count: int) -> np.ndarray:
    """The indices of the largest values, of equal ones the first. For a few this is faster than sorting."""
    left, indices = row.copy(), []
    for _ in range(min(count, len(row))):
        indices.append(int(left.argmax()))
        left[indices[-1]] = -math.inf
    return np.array(indices)


def best_tokens(
    distribution: Distribution, noise: Noise, stream: str, position: int | np.integer, count: int = 1
) -> list[tuple[int, float]]:
    """The `count` tokens with the greatest log w(t) + G(t), and these values; best first, of equals the lower id.

    w are the weights and G Gumbel noise, so the first token is a sample. G is the same for every distribution: two at a
    total variation distance D agree on the first token with probability (1 − D)/(1 + D) or more (Daliri et al. 2024).
    Computed as w(t) / E(t) with exponentials E = exp(−G). Fewer tokens if fewer have weight.
    """
    best = _search_gumbel_max(distribution, noise, stream, position, count, 1.0).best
    return [(token, math.log(-value)) for value, token in best]


def _search_gumbel_max(
    distribution: Distribution, noise: Noise, stream: str, position: int | np.integer, count: int, considered: float
) -> _GumbelMaxSearch:
    """A search of all tokens that may have a value w/E of `considered` times the count-th best, or more."""
    tokens, weights = distribution.tokens, distribution.weights
    numbers = noise.of_tokens(stream, position, len(weights) if tokens is None else int(tokens[-1]) + 1)
    search = _GumbelMaxSearch(numbers, count)
    if tokens is None:
        maxima, least = _group_maxima(weights), numbers.tokens
        bounds = weights.take(least, mode="clip") / numbers.bounds
        bounds *= least < len(weights)
        for token in {int(weights.argmax()), *least[_greatest(bounds, count)].tolist()}:
            if token < len(weights):
                search.add(token, weights.item(token))
        places = _above(weights, maxima, numbers.bounds * (considered * search.threshold))
        search.run(places, weights[places])
    else:
        bounds = numbers.bounds[groups_of(tokens)]
        for place in _greatest(weights / bounds, count).tolist():
            search.add(tokens.item(place), weights.item(place))
        places = np.flatnonzero(weights > bounds * (considered * search.threshold))
        search.run(tokens[places], weights[places])
    return search


def _greatest(values: np.ndarray, count: int) -> np.ndarray:
    """The indices of the greatest values, in any order."""
    if count == 1:
        return np.array([values.argmax()])
    return np.argpartition(values, -count)[-count:] if len(values) > count else np.arange(len(values))


def _group_maxima(weights: np.ndarray) -> np.ndarray:
    """The greatest weight of each group of tokens."""
    maxima = []
    for start in range(0, len(weights), GROUP_STRIDE * GROUP_SIZE):
        span = weights[start : start + GROUP_STRIDE * GROUP_SIZE]
        whole = len(span) // GROUP_STRIDE * GROUP_STRIDE
        greatest, rest = span[:whole].reshape(-1, GROUP_STRIDE), span[whole:]
        greatest = greatest.max(0) if whole else np.zeros(len(rest))
        np.maximum(greatest[: len(rest)], rest, out=greatest[: len(rest)])
        maxima.append(greatest)
    return maxima[0] if len(maxima) == 1 else np.concatenate(maxima)


def _tokens_of_groups(groups: np.ndarray, vocab: int) -> np.ndarray:
    """All tokens of some groups that are less than vocab."""
    places = np.arange(0, min(vocab, GROUP_STRIDE * GROUP_SIZE), GROUP_STRIDE)
    tokens = (first_tokens(groups)[:, None] + places).ravel()
    return tokens if vocab % (GROUP_STRIDE * GROUP_SIZE) == 0 else tokens[tokens < vocab]


def _above(weights: np.ndarray, maxima: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """The tokens whose weight exceeds the limit of their group."""
    tokens = _tokens_of_groups(np.flatnonzero(maxima > limits), len(weights))
    return tokens[weights[tokens] > limits[groups_of(tokens)]]


class _GumbelMaxSearch:
    """The tokens with the greatest w/E so far."""

    def __init__(self, numbers: TokenNoise, count: int) -> None:
        self.numbers = numbers
        self.count = count
        self.best: list[tuple[float, int]] = []  # (−w/E, token), best first
        self.upper = np.empty(0)  # at least w/E, for each token that was searched

    @property
    def threshold(self) -> float:
        """What w/E of a token must exceed at least; 0 while there are fewer than `count` tokens."""
        return -self.best[-1][0] * SLACK if len(self.best) == self.count else 0.0

    def add(self, token: int, weight: float) -> None:
        """Enter one token, if it belongs to the best."""
        if weight:
            entry = -weight / self.numbers.exponential(token), token
            if entry not in self.best:
                insort(self.best, entry)
                del self.best[self.count :]

    def run(self, tokens: np.ndarray, weights: np.ndarray) -> None:
        """Enter tokens, those with the greatest bounds first, while they can belong to the best."""
        if not len(tokens):
            return
        self.upper = weights / self.numbers.exponential_bounds(tokens)
        upper = self.upper.copy()
        while upper[place := int(upper.argmax())] > self.threshold:
            self.add(tokens.item(place), weights.item(place))
            upper[place] = 0
