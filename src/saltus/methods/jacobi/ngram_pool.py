"""Keep n-grams of rejected guesses by their first token, and offer them again (Jacobi Forcing, §3.2)."""

from __future__ import annotations

NGRAMS_PER_TOKEN = 12  # n-grams kept that start with the same token


class NgramPool:
    """Recent n-grams of predicted tokens by first token: `capacity` in all, NGRAMS_PER_TOKEN of each first token."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.size = 0
        self.continuations: dict[int, list[tuple[int, ...]]] = {}  # latest additions last, also of keys

    def add(self, ngram: tuple[int, ...]) -> None:
        """Keep an n-gram of two tokens or more; it replaces the n-gram that it extends by a token."""
        first, tail = ngram[0], ngram[1:]
        tails = self.continuations.pop(first, [])
        self.continuations[first] = tails
        if tail[:-1] in tails:
            tails.remove(tail[:-1])
            self.size -= 1
        tails.append(tail)
        self.size += 1
        if len(tails) > NGRAMS_PER_TOKEN:
            del tails[0]
            self.size -= 1
        while self.size > self.capacity:
            oldest = next(iter(self.continuations))
            del self.continuations[oldest][0]
            self.size -= 1
            if not self.continuations[oldest]:
                del self.continuations[oldest]

    def starting_with(self, token: int, count: int) -> list[tuple[tuple[int, ...], list[float]]]:
        """The continuations of the latest `count` n-grams that start with the token, with estimated probabilities.

        The first token's estimate is a vote in which later n-grams weigh more; constants were fitted on a chat model.
        """
        latest = self.continuations.get(token, [])[::-1]
        weights: dict[int, float] = {}
        for age, tail in enumerate(latest):
            weights[tail[0]] = weights.get(tail[0], 0.0) + 0.75**age
        total = sum(weights.values()) + 0.6
        tails = []
        for tail in list(dict.fromkeys(latest))[:count]:
            first = max(weights[tail[0]] - 0.3, 0.1) / total
            tails.append((tail, [first, *[0.3] * (len(tail) - 1)]))
        return tails
