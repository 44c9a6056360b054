"""Predict the next token by the last few, with an n-gram model of sample texts: what drafts fall back on.

The probabilities are those of interpolated absolute discounting (Ney, Essen and Kneser 1994): of what followed a
context each count is lowered by DISCOUNT, and the shorter context shares what that leaves. What is counted are texts
in which an n-gram occurs: what one text repeats says little of others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float32, Int, Int32, Shaped, UInt64

from saltus.kernels import native

ORDER = 4  # tokens of the longest contexts
CANDIDATES = 4  # tokens that are kept after a context, at most
LEAST_COUNT = 3  # texts: longer contexts than a token that occur in fewer are not kept
DISCOUNT = 0.75
CONFIDENCE = 0.7  # a factor of the probabilities in texts of other models; measured on two chat models
MAX_LOAD = 0.7  # of the table, at most
NO_TOKEN, END_OF_TEXT = -1, -1
EMPTY = 0  # the key of a slot without a context
# NO_TOKEN after the last of the likeliest tokens; the struct NgramSlot of draft_trees.c
SLOT = np.dtype([("key", np.uint64), ("tokens", np.int32, CANDIDATES), ("chances", np.float32, CANDIDATES)])
MASK = 2**64 - 1
FIRST, SECOND = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F  # odd numbers that spread keys


@dataclass(frozen=True, eq=False)
class NgramModel:
    """The likeliest tokens after each context of 1 to ORDER tokens, in a hash table with linear probing.

    A context's key is made of its tokens, the nearest first (`longer_key`). The table may be mapped from a file.
    """

    slots: Shaped[np.ndarray, "slots"]  # of the dtype SLOT, a power of two of them

    @classmethod
    def of_texts(cls, texts: Iterable[Sequence[int]]) -> NgramModel:
        """Count the n-grams of texts; about a second for a million tokens."""
        parts = [np.array([END_OF_TEXT, *text], dtype=np.int64) for text in texts]
        tokens = np.concatenate([*parts, np.empty(0, np.int64)])
        predictions = zip(*_predictions(tokens), strict=True)
        keys, likeliest, chances = (np.concatenate(columns) for columns in predictions)
        slots = np.zeros(1 << math.ceil(math.log2(max(len(keys), 1) / MAX_LOAD)), SLOT)
        taken = _free_slots(keys, len(slots))
        slots["key"][taken], slots["tokens"][taken], slots["chances"][taken] = keys, likeliest, chances
        return cls(slots)

    def after(self, context: Sequence[int]) -> dict[int, float]:
        """The likeliest tokens after the longest ending of `context` that is known, with their probabilities."""
        found, key = NO_TOKEN, 0
        for token in context[: -ORDER - 1 : -1]:
            if token < 0:
                break
            key = longer_key(key, token)
            if (slot := self._slot(key)) < 0:
                break
            found = slot
        if found < 0:
            return {}
        slot = self.slots[found]
        pairs = zip(slot["tokens"].tolist(), slot["chances"].tolist(), strict=True)
        return {token: chance for token, chance in pairs if token != NO_TOKEN}

    @cached_property
    def address(self) -> int:
        """Where the table is."""
        return native.address(self.slots)

    def _slot(self, key: int) -> int:
        """Where a context is, −1 if it is not known."""
        keys, last = self.slots["key"], len(self.slots) - 1
        slot = key & last
        while (known := int(keys[slot])) != key:
            if known == EMPTY:
                return -1
            slot = slot + 1 & last
        return slot


def longer_key(key: int, token: int) -> int:
    """The key of a context with one more token before it; `key` is 0 for none."""
    mixed = (key ^ (token + 1)) * FIRST & MASK
    mixed = (mixed ^ mixed >> 29) * SECOND & MASK
    return (mixed ^ mixed >> 32) or 1


def _longer_keys(keys: UInt64[np.ndarray, "keys"], tokens: Int[np.ndarray, "keys"]) -> UInt64[np.ndarray, "keys"]:
    mixed = (keys ^ (tokens + 1).astype(np.uint64)) * np.uint64(FIRST)
    mixed = (mixed ^ mixed >> np.uint64(29)) * np.uint64(SECOND)
    return np.maximum(mixed ^ mixed >> np.uint64(32), np.uint64(1))


def _predictions(
    tokens: Int[np.ndarray, "tokens"],
) -> Iterable[tuple[UInt64[np.ndarray, "n"], Int32[np.ndarray, "n candidates"], Float32[np.ndarray, "n candidates"]]]:
    """By the contexts' length: their keys, and the likeliest tokens after each with their probabilities."""
    places = np.flatnonzero(tokens != END_OF_TEXT)
    counts = np.bincount(tokens[places])
    text = np.cumsum(tokens == END_OF_TEXT)
    keys = np.zeros(len(places), np.uint64)
    pairs, of_pairs = np.arange(len(counts), dtype=np.uint64), counts / max(len(places), 1)  # of no context
    for length in range(1, ORDER + 1):
        shorter = _longer_keys(keys, tokens[places]) if length > 1 else tokens[places].astype(np.uint64)
        inside = places >= length
        places, keys, shorter = places[inside], keys[inside], shorter[inside]
        before = tokens[places - length]
        inside = before != END_OF_TEXT
        places, shorter = places[inside], shorter[inside]
        keys = _longer_keys(keys[inside], before[inside])
        own, first, count = _different(_longer_keys(keys, tokens[places]), text[places])
        lower = of_pairs[np.searchsorted(pairs, shorter[first])]
        contexts, context, different = np.unique(keys[first], return_inverse=True, return_counts=True)
        total = np.bincount(context, weights=count, minlength=len(contexts))
        chances = (count - DISCOUNT + DISCOUNT * different[context] * lower) / total[context]
        pairs, of_pairs = own, chances
        order = np.lexsort((-chances, context))
        rank = np.arange(len(order)) - (np.cumsum(different) - different)[context[order]]
        order, rank = order[rank < CANDIDATES], rank[rank < CANDIDATES]
        likeliest = np.full((len(contexts), CANDIDATES), NO_TOKEN, np.int32)
        of_likeliest = np.zeros((len(contexts), CANDIDATES), np.float32)
        likeliest[context[order], rank] = tokens[places[first[order]]]
        of_likeliest[context[order], rank] = CONFIDENCE * chances[order]
        kept = (total >= LEAST_COUNT) | (length == 1)
        yield contexts[kept], likeliest[kept], of_likeliest[kept]


def _different(
    keys: UInt64[np.ndarray, "keys"], texts: Int[np.ndarray, "keys"]
) -> tuple[UInt64[np.ndarray, "different"], Int[np.ndarray, "different"], Int[np.ndarray, "different"]]:
    """The different keys in ascending order, where each is first, and in how many of the texts, which ascend."""
    order = np.argsort(keys, kind="stable")
    keys, texts = keys[order], texts[order]
    is_other_key, is_other_text = np.ones((2, len(keys)), bool)
    is_other_key[1:], is_other_text[1:] = keys[1:] != keys[:-1], texts[1:] != texts[:-1]
    starts = np.flatnonzero(is_other_key)
    counted = np.append(0, np.cumsum(is_other_key | is_other_text))
    return keys[starts], order[starts], np.diff(counted[np.append(starts, len(keys))])


def _free_slots(keys: UInt64[np.ndarray, "keys"], size: int) -> Int[np.ndarray, "keys"]:
    """A slot of its own for each key: the first one from its own place on that no earlier key took."""
    slots = (keys & np.uint64(size - 1)).astype(np.int64)
    taken, waiting = np.zeros(size, bool), np.arange(len(keys))
    while len(waiting):
        free, first = np.unique(slots[waiting], return_index=True)
        placed = np.zeros(len(waiting), bool)
        placed[first[~taken[free]]] = True
        taken[slots[waiting[placed]]] = True
        waiting = waiting[~placed]
        slots[waiting] = slots[waiting] + 1 & size - 1
    return slots
