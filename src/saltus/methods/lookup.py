"""Draft by prompt lookup: continue the text as its earlier occurrences of the last tokens continued."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from saltus.core.canvas import Canvas
from saltus.core.distributions import Step
from saltus.core.noise import Noise
from saltus.core.protocols import Drafter
from saltus.core.rules import Rule
from saltus.core.sampling import Sampling
from saltus.core.tree import Branch, Drafts
from saltus.core.value_types import require_at_least
from saltus.methods.shared.answer_memory import AnswerMemory, ngram_number, ngram_numbers, num_agreeing
from saltus.methods.shared.ngram_corpus import NgramCorpus
from saltus.methods.shared.ngram_model import ORDER, NgramModel
from saltus.methods.shared.repeat_paths import repeat_paths

MIN_PATH_PROBABILITY = 0.005  # nodes with a smaller path probability are not offered
END_OF_REFERENCE = -1  # follows the tokens of a reference, and is never drafted
REMEMBERED, CORPUS = "lookup/remembered", "lookup/corpus"  # the sources of drafts from earlier answers, and a corpus
MAX_REMEMBERED_MATCHES = 8  # latest occurrences in earlier answers that are used
MAX_CORPUS_MATCHES = 4  # occurrences in a corpus that are used
SURE_REPEAT = 32  # after a repeat of so many tokens the text goes on as there in 98 % of the cases
MAX_SURE_MATCHES = 4  # latest sure repeats that are used: the others hardly change the drafts, and take time
LONG_REPEAT = 3  # repeats of so many tokens are indexed apart from single tokens, and so are found further back
INDEXED = 1, LONG_REPEAT
MANY_TOKENS = 128  # so many at once are sorted, which takes a quarter of the time
VERY_MANY_TOKENS = 8192  # so many stay in sorted arrays, which are made sooner than a dictionary but searched longer
LIMITS = SURE_REPEAT, MAX_SURE_MATCHES, MIN_PATH_PROBABILITY  # of the kernel

Repeat = tuple[int, int]
"""An earlier occurrence of the text's last tokens: (position after it, how many tokens agree)."""


@dataclass(frozen=True)
class Lookup:
    """Prompt lookup (Saxena 2023) as a tree: each earlier occurrence of the last tokens offers its continuation.

    All occurrences vote; longer and later ones count more, and the most likely nodes are offered. An n-gram model of
    sample texts votes, too, most where nothing repeats.
    """

    max_ngram_size: int = 64  # longer repeats count like this length
    max_matches: int = 32  # latest occurrences that are used, of each n-gram
    num_draft_tokens: int = 31  # of a tree, at most
    ngram_model: bool = True  # fall back on an n-gram model of sample texts
    draft_models: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        require_at_least(self, "lookup: ", max_ngram_size=1, max_matches=1, num_draft_tokens=1)

    def drafter(self, noise: Noise, sampling: Sampling, rule: Rule) -> Drafter:
        return LookupDrafter(RepeatIndex(self.max_ngram_size, self.max_matches), self.num_draft_tokens)


@dataclass
class LookupDrafter:
    """Drafts one text. References are other texts to copy from: they stand before it, apart from each other."""

    index: RepeatIndex
    num_draft_tokens: int
    expected: int | None = None  # where a text begins that the new one is expected to repeat
    memory: AnswerMemory | None = None
    corpus: NgramCorpus | None = None
    ngram_model: NgramModel | None = None

    def add_reference(self, tokens: Sequence[int], expected: bool) -> None:
        """Copy from these tokens, too; with `expected` the new text probably begins as they do."""
        if expected:
            self.expected = len(self.index.tokens)
        self.index.add_reference(tokens)

    def __call__(self, canvas: Canvas, last: Step | None, max_depth: int) -> Sequence[Drafts]:
        index, most = self.index, self.num_draft_tokens
        index.read(canvas.decided_prefix)
        expected = [(self.expected, index.max_ngram_size)] if last is None and self.expected is not None else []
        offered: list[Drafts] = [*index.paths(expected, most, max_depth, self.ngram_model)]
        if self.memory is not None or self.corpus is not None:
            text = index.tokens[max(index.start, len(index.tokens) - index.max_ngram_size) :]
            sources = (self.memory, MAX_REMEMBERED_MATCHES, REMEMBERED), (self.corpus, MAX_CORPUS_MATCHES, CORPUS)
            for texts, most_matches, source in sources:
                found = () if texts is None else texts.repeats(text, index.max_ngram_size, most_matches)
                for tokens, repeats in found:
                    offered += paths(tokens, repeats, (), 0, 0, most, max_depth, source)
        return offered


def paths(
    text: array,
    repeats: list[Repeat],
    chains: Sequence[tuple[array, int]],
    max_matches: int,
    max_size: int,
    num_draft_tokens: int,
    max_depth: int,
    source: str = "lookup",
    ngrams: NgramModel | None = None,
) -> Sequence[Drafts]:
    """`branches` of repeats and of those in chains, see `RepeatIndex.chains`; by a kernel where there is one."""
    found = repeat_paths(
        text, repeats, chains, max_matches, max_size, num_draft_tokens, max_depth, LIMITS, source, ngrams
    )  # fmt: skip
    if found is None:
        repeats = repeats + repeats_of_chains(text, chains, max_matches, max_size)
        found = branches(text, repeats, num_draft_tokens, max_depth, source, ngrams)
    return found


def branches(
    text: Sequence[int],
    repeats: Sequence[Repeat],
    num_draft_tokens: int,
    max_depth: int,
    source: str = "lookup",
    ngrams: NgramModel | None = None,
) -> list[Branch]:
    """The tree of the `num_draft_tokens` most likely tokens, as the paths to its leaves, none longer than `max_depth`.

    A repeat that reaches the end of the text continues in the branch itself, so periodic text can be drafted on. What
    an n-gram model predicts counts like the shortest repeat, where none is sure.
    """
    sure = [repeat for repeat in repeats if repeat[1] >= SURE_REPEAT][:MAX_SURE_MATCHES]
    repeats, ngrams = sure or repeats, None if sure else ngrams
    paths: list[Branch | None] = []  # None: a longer one was found
    heap: list[tuple[float, int, int, list[int], list[float], list[Repeat]]] = [(-1.0, 0, 0, [], [], list(repeats))]
    pushed = 0
    while heap and len(paths) <= num_draft_tokens:
        negative, _, parent, tokens, probabilities, alive = heapq.heappop(heap)
        if paths:
            paths[parent] = None
        parent = len(paths)
        paths.append(Branch(tokens, probabilities, source))
        if len(tokens) == max_depth:
            continue
        alive = [(at, size) for at, size in alive if at >= len(text) or text[at] != END_OF_REFERENCE]
        ahead = [text[at] if at < len(text) else tokens[at - len(text)] for at, _ in alive]
        known = {} if ngrams is None else ngrams.after([*text[-ORDER:], *tokens])
        for token, vote in votes(ahead, [size for _, size in alive], known).items():
            if -negative * vote >= MIN_PATH_PROBABILITY:
                pushed += 1
                agreeing = [
                    (at + 1, size + 1) for (at, size), next_ in zip(alive, ahead, strict=True) if next_ == token
                ]
                longer = [*tokens, token], [*probabilities, vote]
                heapq.heappush(heap, (negative * vote, pushed, parent, *longer, agreeing))
    return [path for path in paths[1:] if path is not None]


def votes(
    tokens: Sequence[int], sizes: Sequence[int], known: Mapping[int, float] = MappingProxyType({})
) -> dict[int, float]:
    """The probability of each next token, given that `tokens` followed repeats of `sizes`, the latest first.

    Interpolated Pitman–Yor smoothing (Teh 2006) from short repeats to long ones, at first from the probabilities that
    are known without repeats; older occurrences weigh less.
    Strength, discounts and decay were fitted to answers of a small chat model by log-likelihood: what followed repeats
    of 16 tokens followed again in 93 % of the cases, of 32 in 98 %, of 64 in 99.7 %.
    """
    probabilities = {**known, **{token: 0.0 for token in tokens if token not in known}}
    for least in sorted(set(sizes)):
        counts: dict[int, float] = {}
        weight, total = 1.0, 0.0
        for token, size in zip(tokens, sizes, strict=True):
            if size >= least:
                counts[token] = counts.get(token, 0.0) + weight
                total += weight
                weight *= 0.9
        strength = 2.25 * least**-1.63
        discount = min(0.31, 40 / least**2)
        discounts = {token: min(discount, count) for token, count in counts.items()}
        discounted = 0.0
        for each in discounts.values():  # one after the other, which `sum` is not in every version of Python
            discounted += each
        shorter = strength + discounted
        for token in probabilities:
            count = counts.get(token, 0.0) - discounts.get(token, 0.0)
            probabilities[token] = (count + shorter * probabilities[token]) / (total + strength)
    return probabilities


class RepeatIndex:
    """Chains of the positions after each token, and after each LONG_REPEAT tokens, of a growing text."""

    def __init__(self, max_ngram_size: int, max_matches: int) -> None:
        self.max_ngram_size, self.max_matches = max_ngram_size, max_matches
        self.tokens = array("q")
        # by size of the n-gram: for each position where the n-gram before it ended before, −1 for nowhere
        self._before = tuple(array("q") for _ in INDEXED)
        # where each n-gram ended last: of very many tokens at once ascending n-grams and their ends, else a dictionary
        self._sorted: tuple[list[tuple[np.ndarray, np.ndarray]], ...] = tuple([] for _ in INDEXED)
        self._latest: tuple[dict[int, int], ...] = tuple({} for _ in INDEXED)
        self.start = 0  # of the text, after the references

    def add_reference(self, tokens: Sequence[int]) -> None:
        """Index a text that stands before the one to be continued. Before `read`."""
        assert len(self.tokens) == self.start
        self._append([*tokens, END_OF_REFERENCE])
        self.start = len(self.tokens)

    def read(self, text: np.ndarray) -> None:
        """Index the new tokens; the text may only grow."""
        self._append(text[len(self.tokens) - self.start :])

    def _append(self, tokens: Sequence[int] | np.ndarray) -> None:
        first = len(self.tokens)
        self.tokens.frombytes(np.asarray(tokens, dtype=np.int64).tobytes())
        for which, size in enumerate(INDEXED):
            if len(tokens) >= MANY_TOKENS:
                self._index_many(first, which)
                continue
            for end in range(first, len(self.tokens)):
                ngram = self._ngram(end, size)
                self._before[which].append(self._last_end(which, ngram))
                if ngram >= 0:
                    self._latest[which][ngram] = end

    def _index_many(self, first: int, which: int) -> None:
        """Index the n-grams before position `first` and all after it, by sorting them."""
        size = INDEXED[which]
        ends = np.arange(max(first, size), len(self.tokens))
        tokens = np.frombuffer(self.tokens, dtype=np.int64)
        ngrams = ngram_numbers(tokens[max(first - size, 0) : -1], size)
        order = np.argsort(ngrams, kind="stable")
        ascending, begins = ngrams[order], np.ones(len(ends), dtype=bool)
        begins[1:] = ascending[1:] != ascending[:-1]  # where another n-gram begins
        found = np.empty_like(ends)
        found[order[1:]] = ends[order[:-1]]
        different = ascending[begins]
        found[order[begins]] = self._last_ends(which, different)
        self._before[which].extend([-1] * (int(len(self.tokens) - len(ends)) - first))
        self._before[which].frombytes(found.tobytes())
        last = ends[order[np.roll(begins, -1)]]
        if len(ends) < VERY_MANY_TOKENS:
            self._latest[which].update(zip(different.tolist(), last.tolist(), strict=True))
        else:
            self._sorted[which].append((different, last))

    def _last_ends(self, which: int, ngrams: np.ndarray) -> np.ndarray:
        """Where n-grams, given in ascending order, ended last, −1 for nowhere."""
        last, latest = np.full(len(ngrams), -1), self._latest[which]
        few = np.fromiter(latest, np.int64), np.fromiter(latest.values(), np.int64)
        for known, ends in (*self._sorted[which], few) if len(ngrams) else ():
            places = np.searchsorted(ngrams, known).clip(max=len(ngrams) - 1)
            same = ngrams[places] == known
            last[places[same]] = np.maximum(last[places[same]], ends[same])
        return last

    def _last_end(self, which: int, ngram: int) -> int:
        """Where an n-gram ended last, −1 for nowhere."""
        last = self._latest[which].get(ngram, -1)
        for ngrams, ends in self._sorted[which]:
            place = ngrams.searchsorted(ngram)
            if place < len(ngrams) and ngrams[place] == ngram:
                last = max(last, int(ends[place]))
        return last

    def _ngram(self, end: int, size: int) -> int:
        """A number of the `size` tokens before a position, −1 if there are fewer."""
        return ngram_number(self.tokens[end - size : end]) if size <= end else -1

    @property
    def chains(self) -> list[tuple[array, int]]:
        """By size of the n-gram: where each position's n-gram ended before, and where that of the text's end did."""
        end = len(self.tokens)
        return [
            (self._before[which], self._last_end(which, self._ngram(end, size))) for which, size in enumerate(INDEXED)
        ]

    def repeats(self) -> list[Repeat]:
        """The earlier occurrences of the text's last tokens, the latest first."""
        return repeats_of_chains(self.tokens, self.chains, self.max_matches, self.max_ngram_size)

    def paths(
        self, repeats: list[Repeat], num_draft_tokens: int, max_depth: int, ngrams: NgramModel | None = None
    ) -> Sequence[Drafts]:
        """What may follow the text, after some repeats and those that are found."""
        return paths(
            self.tokens, repeats, self.chains, self.max_matches, self.max_ngram_size, num_draft_tokens, max_depth,
            ngrams=ngrams,
        )  # fmt: skip


def repeats_of_chains(
    text: array, chains: Sequence[tuple[array, int]], max_matches: int, max_size: int
) -> list[Repeat]:
    """The repeats of the last tokens of a text, `max_matches` of each chain, the latest first."""
    ends: set[int] = set()
    for before, at in chains:
        left = max_matches
        while at >= 0 and left:
            ends.add(at)
            at, left = before[at], left - 1
    return [(at, num_agreeing(text, at, text, len(text), max_size)) for at in sorted(ends, reverse=True)]
