"""Remember earlier answers, to draft later ones from them: requests repeat, often with small changes."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, MutableSequence, Sequence

import numpy as np

KEY_LENGTH = 3  # tokens by which places are found
TOKEN_BITS = 21  # of a token id in the number of an n-gram: three of them in 63 bits
COMPARED_TOGETHER = 16  # tokens
CONTEXT = 32  # last tokens of a prompt that are remembered before its answer: by them its first token is found
BYTES_PER_TOKEN = 120  # measured: 118 of tokens at random, 65 of text
END_OF_ANSWER = -1


def num_agreeing(
    one: MutableSequence[int], one_end: int, other: MutableSequence[int], other_end: int, limit: int
) -> int:
    """How many tokens before these ends agree, at most `limit`. Both are lists, or both arrays."""
    size, limit, many = 0, min(limit, one_end, other_end), COMPARED_TOGETHER
    while size + many <= limit:
        at, place = one_end - size, other_end - size
        if one[at - many : at] != other[place - many : place]:
            break
        size += many
    while size < limit and one[one_end - 1 - size] == other[other_end - 1 - size]:
        size += 1
    return size


def ngram_number(ngram: Iterable[int]) -> int:
    """A number for at most three tokens, not negative; −1 may stand for a token."""
    number = 0
    for token in ngram:
        number = number << TOKEN_BITS | token + 1
    return number


def ngram_numbers(tokens: np.ndarray, size: int) -> np.ndarray:
    """`ngram_number` of each `size` consecutive tokens, which are int64."""
    numbers = np.zeros(max(len(tokens) - size + 1, 0), dtype=np.int64)
    for first in range(size):
        numbers = numbers << TOKEN_BITS | tokens[first : first + len(numbers)] + 1
    return numbers


class AnswerMemory:
    """Answers of the recent past, at most `max_bytes` of them. When half is full the older half is forgotten."""

    def __init__(self, max_bytes: int) -> None:
        self.max_tokens = max_bytes // BYTES_PER_TOKEN // 2
        self.generations = [_RememberedTexts()]  # the newest first

    @property
    def num_bytes(self) -> int:
        """About as much memory as is used."""
        return BYTES_PER_TOKEN * sum(len(texts.tokens) for texts in self.generations)

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Remember an answer, as far as there is room for one."""
        tokens = [*prompt[-CONTEXT:], *answer][: self.max_tokens - 1]
        if len(self.generations[0].tokens) + len(tokens) >= self.max_tokens:
            self.generations = [_RememberedTexts(), self.generations[0]]
        self.generations[0].add(tokens)

    def repeats(
        self, text: Sequence[int], max_ngram_size: int, max_matches: int
    ) -> list[tuple[array, list[tuple[int, int]]]]:
        """Where the last tokens of `text` occurred: tokens, and (position after them, how many agree), latest first."""
        by_generation = [(texts.tokens, texts.repeats(text, max_ngram_size, max_matches)) for texts in self.generations]
        return [(tokens, repeats) for tokens, repeats in by_generation if repeats]


class _RememberedTexts:
    """Texts one after the other, with chains of the places of each KEY_LENGTH tokens (as Lempel and Ziv's coders)."""

    def __init__(self) -> None:
        self.tokens = array("q")
        self.before = array("q")  # for each token: where its key occurred before, −1 if nowhere
        self.latest: dict[int, int] = {}  # by the number of a key

    def add(self, tokens: Sequence[int]) -> None:
        start, latest = len(self.tokens), self.latest
        self.tokens.extend([*tokens, END_OF_ANSWER])
        before = [-1] * min(KEY_LENGTH - 1, len(tokens))
        keys = ngram_numbers(np.array(tokens, dtype=np.int64), KEY_LENGTH).tolist()
        for end, key in enumerate(keys, start=start + KEY_LENGTH):
            before.append(latest.get(key, -1))
            latest[key] = end
        self.before.extend([*before, -1])

    def repeats(self, text: Sequence[int], max_ngram_size: int, max_matches: int) -> list[tuple[int, int]]:
        repeats: list[tuple[int, int]] = []
        at = self.latest.get(ngram_number(text[-KEY_LENGTH:]), -1) if len(text) >= KEY_LENGTH else -1
        text = array("q", text)
        while at >= 0 and len(repeats) < max_matches:
            repeats.append((at, num_agreeing(self.tokens, at, text, len(text), max_ngram_size)))
            at = self.before[at - 1]
        return repeats


class AnswerMemories:
    """A memory for each group of requests that may learn from each other; together at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.memories: OrderedDict[str, AnswerMemory] = OrderedDict()  # the least recently used first

    def of(self, group: str) -> AnswerMemory:
        """The memory of a group; others that were not used for longest are forgotten where there is no room."""
        memory = self.memories.setdefault(group, AnswerMemory(self.max_bytes))
        self.memories.move_to_end(group)
        while len(self.memories) > 1 and sum(each.num_bytes for each in self.memories.values()) > self.max_bytes:
            self.memories.popitem(last=False)
        return memory
