"""Remember earlier answers, to draft later ones from them: requests repeat, often with small changes."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import MutableSequence, Sequence

KEY_LENGTH = 3  # tokens by which places are found
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
        self.latest: dict[int, int] = {}  # by the hash of a key

    def add(self, tokens: Sequence[int]) -> None:
        start = len(self.tokens)
        self.tokens.extend([*tokens, END_OF_ANSWER])
        for end in range(start + 1, len(self.tokens)):
            key = hash(tuple(self.tokens[max(end - KEY_LENGTH, start) : end]))
            self.before.append(self.latest.get(key, -1))
            self.latest[key] = end
        self.before.append(-1)

    def repeats(self, text: Sequence[int], max_ngram_size: int, max_matches: int) -> list[tuple[int, int]]:
        repeats: list[tuple[int, int]] = []
        at = self.latest.get(hash(tuple(text[-KEY_LENGTH:])), -1) if len(text) >= KEY_LENGTH else -1
        text = array("q", text)
        while at >= 0 and len(repeats) < max_matches:
            size = num_agreeing(self.tokens, at, text, len(text), max_ngram_size)
            if size >= KEY_LENGTH:  # hashes may agree by accident
                repeats.append((at, size))
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
