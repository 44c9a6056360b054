"""Look up the last tokens of a text in a corpus of other texts, by a suffix array of what stands before each token.

The array sorts the places of the corpus by the tokens before them, the nearest first (Manber and Myers 1993, of the
reversed text). So the places before which most of a text's last tokens stand, too, are neighbours, and bisection
finds them and their number, whatever the size of the corpus.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int, UInt32

END_OF_TEXT = -1  # stands after each text of a corpus
LEAST_AGREEING = 4  # tokens: fewer occur anywhere
MAX_AGREEING = 64  # tokens by which places are sorted
CONTINUATION = 32  # tokens after a place that can be drafted
WORD = 4  # bytes of a token

Repeat = tuple[int, int]
"""Where a continuation begins, and how many tokens before it agree."""


@dataclass(frozen=True, eq=False)
class NgramCorpus:
    """Texts one after the other, and their places in the order of the tokens before them.

    Both arrays may be mapped from files; nothing is changed. Tokens are stored backwards, each plus one, 0 at the ends
    of texts, as big-endian words: so the order of their bytes is that of the tokens before a place.
    """

    backwards: UInt32[np.ndarray, "tokens"]
    places: Int[np.ndarray, "places"]  # int32, each the number of tokens before it
    num_token_ids: int = 2**31  # tokens from here on are not drafted
    _bytes: memoryview = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_bytes", np.ascontiguousarray(self.backwards).view(np.uint8).data)

    @classmethod
    def of_texts(cls, texts: Sequence[Sequence[int]]) -> NgramCorpus:
        """Sort the places of texts; a second or two for a million tokens."""
        parts = [np.array([*text, END_OF_TEXT], dtype=np.int64) for text in texts]
        tokens = np.concatenate([*parts, np.empty(0, np.int64)])
        return cls((tokens[::-1] + 1).astype(">u4"), sorted_places(tokens))

    def __len__(self) -> int:
        return len(self.backwards)

    def repeats(self, text: Sequence[int], max_ngram_size: int, max_matches: int) -> list[tuple[array, list[Repeat]]]:
        """What followed the last tokens of `text`: continuations one after the other, and repeats that begin there.

        The longest agreements are taken. Of more equal ones than `max_matches` an even sample is; tokens that follow
        more often come first.
        """
        last = text[-min(MAX_AGREEING, max_ngram_size) :][::-1]
        ending = (np.asarray(last, dtype=np.int64) + 1).astype(">u4").tobytes()
        if len(last) < LEAST_AGREEING or not len(self.places):
            return []
        ahead = [(self._ahead(place), size) for place, size in self._nearest(ending, max_matches)]
        follows = Counter((size, tokens[0]) for tokens, size in ahead)
        ahead.sort(key=lambda each: (-each[1], -follows[each[1], each[0][0]]))
        continuations = array("q")
        repeats: list[Repeat] = []
        for tokens, size in ahead:
            repeats.append((len(continuations), size))
            continuations.extend(tokens)
        return [(continuations, repeats)] if repeats else []

    def _nearest(self, ending: bytes, max_matches: int) -> list[tuple[int, int]]:
        """Places before which `ending` stands, and at least how much of it, the longest first."""
        size = self._longest(ending)
        matches: list[tuple[int, int]] = []
        inner = range(0)  # of the numbers of places that agree in more: they stand among those that agree in fewer
        while size >= LEAST_AGREEING and len(matches) < max_matches:
            outer = self._numbers(ending[: size * WORD], inner)
            around = len(outer) - len(inner)
            for i in range(kept := min(around, max_matches - len(matches))):
                number = outer.start + i * around // kept
                number += len(inner) if inner and number >= inner.start else 0
                matches.append((int(self.places[number]), size))
            inner, size = outer, max(size // 2, LEAST_AGREEING) if size > LEAST_AGREEING else 0
        return matches

    def _longest(self, ending: bytes) -> int:
        """The number of tokens of `ending` that stand before some place: before one of the two next to it in order."""
        number = bisect_left(range(len(self.places)), ending, key=lambda i: self._before(i, len(ending)))
        neighbours = [self._before(i, len(ending)) for i in (number - 1, number) if 0 <= i < len(self.places)]
        return max(_common_bytes(before, ending) for before in neighbours) // WORD

    def _numbers(self, ending: bytes, inner: range) -> range:
        """The numbers of all places before which `ending` stands; those of `inner` are among them."""
        count = len(self.places)
        last = inner.start if inner else count
        first = bisect_left(range(last), ending, key=lambda i: self._before(i, len(ending)))
        low = inner.stop if inner else first
        return range(first, low + bisect_right(range(low, count), ending, key=lambda i: self._before(i, len(ending))))

    def _before(self, number: int, size: int) -> bytes:
        start = (len(self.backwards) - int(self.places[number])) * WORD
        return self._bytes[start : start + size].tobytes()

    def _ahead(self, place: int) -> list[int]:
        """The tokens from a place on, as far as its text goes, and an end."""
        end = len(self.backwards) - place
        tokens = (self.backwards[max(end - CONTINUATION, 0) : end][::-1].astype(np.int64) - 1).tolist()
        count = next((i for i, token in enumerate(tokens) if not 0 <= token < self.num_token_ids), len(tokens))
        return [*tokens[:count], END_OF_TEXT]


def _common_bytes(one: bytes, other: bytes) -> int:
    return next((i for i, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), len(one))


def sorted_places(tokens: Int[np.ndarray, "tokens"]) -> Int[np.ndarray, "places"]:
    """The places of all tokens but ends, sorted by the MAX_AGREEING tokens before each, the nearest first.

    By doubling the number of tokens that are compared (Manber and Myers 1993).
    """
    if not len(tokens):
        return np.empty(0, np.int32)
    ranks = np.unique(np.concatenate([[END_OF_TEXT], tokens[:-1]]), return_inverse=True)[1].astype(np.int64)
    compared = 1
    while compared < min(MAX_AGREEING, len(tokens)):
        further = np.concatenate([np.zeros(compared, np.int64), ranks[:-compared]])
        ranks = np.unique(ranks * (ranks.max() + 1) + further, return_inverse=True)[1].astype(np.int64)
        compared *= 2
    order = np.argsort(ranks, kind="stable").astype(np.int32)
    return order[tokens[order] != END_OF_TEXT]
