"""Compare greedy texts, and say of each difference whether rounding explains it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from saltus.evaluation.audit.client import Reply, Request, Side, Token, answer
from saltus.evaluation.audit.statistics import Differences, exchangeability_test
from saltus.integrations.openai_endpoint import EndpointError

MIN_TOLERANCE, MAX_TOLERANCE = 0.05, 0.5  # nats: a gap of log-probabilities that rounding may flip
NOISE_FACTOR = 10  # a near tie is within so many times the 90 % quantile of the noise of log-probabilities,
LARGEST_FACTOR = 2  # or so many times the largest: two log-probabilities may move so far towards each other
ATTEMPTS = 3  # at a reference whose text goes the common way as far as the difference


@dataclass(frozen=True)
class Difference:
    """Where two texts part: characters in common, what follows in each, and the gap of log-probabilities."""

    position: int  # in characters
    first: str
    second: str
    gap: float | None = None  # nats, under the reference; None: unknown
    at_least: bool = False  # one of the tokens is not among the likeliest ones

    def describe(self) -> str:
        """One line."""
        gap = "gap unknown" if self.gap is None else f"gap {'at least ' * self.at_least}{self.gap:.3g} nats"
        return f"at character {self.position}: {self.first!r} against {self.second!r} ({gap})"


@dataclass
class References:
    """Answers of the side without speculation with log-probabilities, made when a difference needs one."""

    side: Side
    available: bool
    tolerance: float = MIN_TOLERANCE
    made: dict[str, list[tuple[Token, ...]]] = field(default_factory=dict)

    def gap(self, request: Request, first: str, second: str) -> tuple[float | None, bool]:
        """The gap between what two texts take at their first difference, and whether it is a lower bound."""
        if not self.available:
            return None, False
        runs = self.made.setdefault(request.prompt, [])
        for attempt in range(ATTEMPTS):
            if attempt == len(runs):
                runs.append(self._run(request))
            found = gap_in_reference(runs[attempt], first, second)
            if found is not None:
                return found
        return None, False

    def _run(self, request: Request) -> tuple[Token, ...]:
        try:
            return answer(self.side, replace(request, stream=False, logprobs=True)).tokens or ()
        except EndpointError:
            return ()


def gap_in_reference(tokens: Sequence[Token], first: str, second: str) -> tuple[float, bool] | None:
    """The gap at the token where two texts part; None if the reference goes another way before."""
    first_bytes, second_bytes = first.encode(), second.encode()
    read = b""
    for token in tokens:
        longer = read + token.text
        if first_bytes.startswith(longer) and second_bytes.startswith(longer):
            read = longer
            continue
        if not (first_bytes.startswith(read) and second_bytes.startswith(read)) or not token.top:
            return None
        found = [_logprob_of(token, text[len(read) :]) for text in (first_bytes, second_bytes)]
        least = min(token.top.values())
        known = [value for value in found if value is not None]
        if not known:
            return None
        if len(known) == 1:
            return max(known[0] - least, 0.0), True
        return abs(known[0] - known[1]), False
    return None


def _logprob_of(token: Token, rest: bytes) -> float | None:
    """The log-probability of the likeliest listed token that the rest of a text begins with, or that ends a text."""
    listed = {token.text: token.logprob, **token.top}
    if not rest:
        ends = [value for text, value in listed.items() if not text or text.startswith((b"<|", b"</s", b"<end"))]
        return max(ends, default=None)
    return max((value for text, value in listed.items() if text and rest.startswith(text)), default=None)


def first_difference(request: Request, first: str, second: str, references: References) -> Difference | None:
    """Where two texts part; None if they are equal."""
    if first == second:
        return None
    position = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    gap, at_least = references.gap(request, first, second)
    return Difference(position, first[position : position + 12], second[position : position + 12], gap, at_least)


@dataclass
class Comparison:
    """Groups of replies to equal requests, half of each group from either side, and how they differ."""

    requests: Sequence[Request]
    groups: Sequence[Sequence[Reply]]
    references: References
    unequal: list[Differences] = field(default_factory=list)
    beyond_rounding: list[Differences] = field(default_factory=list)
    across: list[tuple[int, Difference]] = field(default_factory=list)  # group, difference between the sides

    def __post_init__(self) -> None:
        for number, (request, replies) in enumerate(zip(self.requests, self.groups, strict=True)):
            self._add_group(number, request, [reply.text for reply in replies])

    def _add_group(self, number: int, request: Request, texts: Sequence[str]) -> None:
        unequal = np.zeros((len(texts), len(texts)), dtype=np.int64)
        beyond = unequal.copy()
        known: dict[tuple[str, str], Difference | None] = {}
        for i in range(len(texts)):
            for j in range(i + 1, len(texts)):
                key = texts[i], texts[j]
                if key not in known:
                    known[key] = first_difference(request, *key, self.references)
                if (difference := known[key]) is None:
                    continue
                unequal[i, j] = unequal[j, i] = 1
                beyond[i, j] = beyond[j, i] = not self.is_rounding(difference)
        self.unequal.append(unequal)
        self.beyond_rounding.append(beyond)
        half = len(texts) // 2
        crossing = [
            known[pair] for i in range(half) for j in range(half, len(texts)) if (pair := (texts[i], texts[j])) in known
        ]
        worst = max(filter(None, crossing), key=lambda one: (not self.is_rounding(one), one.gap or 0.0), default=None)
        if worst is not None:
            self.across.append((number, worst))

    def is_rounding(self, difference: Difference) -> bool:
        """True if the two tokens were a near tie, or nothing is known of them where logprobs are to be had."""
        if difference.gap is None:
            return self.references.available
        return difference.gap <= self.references.tolerance

    @property
    def parted(self) -> int:
        """Groups in which the sides differ."""
        return len(self.across)

    @property
    def faults(self) -> list[tuple[int, Difference]]:
        """Differences between the sides that rounding does not explain."""
        return [(number, one) for number, one in self.across if not self.is_rounding(one)]

    def within(self, side: int) -> int:
        """Groups in which a side (0 or 1) differs from itself."""
        return sum(differs_within(group, side) for group in self.unequal)

    def p_value(self) -> float:
        """Of "what rounding does not explain is on both sides alike"."""
        return exchangeability_test(self.beyond_rounding)

    def examples(self, name: Callable[[int], str]) -> list[str]:
        """Lines about the largest differences."""
        ranked = sorted(self.across, key=lambda pair: (self.is_rounding(pair[1]), -(pair[1].gap or 0.0)))
        return [f"{name(number)}, {one.describe()}" for number, one in ranked[:5]]

    def example_request(self) -> Request:
        """The request of a largest difference, whole. There is one."""
        largest = max(self.across, key=lambda pair: (not self.is_rounding(pair[1]), pair[1].gap or 0.0))
        return replace(self.requests[largest[0]], stream=False)


def differs_within(group: Differences, side: int) -> bool:
    """True if a side (0 or 1) differs from itself in a group."""
    half = len(group) // 2
    part = slice(0, half) if side == 0 else slice(half, None)
    return bool(group[part, part].any())


def rounding_tolerance(noise: Sequence[float]) -> float:
    """The largest gap that counts as a near tie, of absolute differences of log-probabilities of the same tokens."""
    if not len(noise):
        return MIN_TOLERANCE
    typical, largest = np.quantile(np.asarray(noise), (0.9, 1.0))
    return float(min(MAX_TOLERANCE, max(MIN_TOLERANCE, NOISE_FACTOR * typical, LARGEST_FACTOR * largest)))


def token_differences(first: Sequence[Token], second: Sequence[Token]) -> list[float]:
    """Absolute differences of log-probabilities on the tokens that two answers begin with, where both are given."""
    found = []
    for one, other in zip(first, second, strict=False):
        if one.text != other.text:
            break
        if one.top and other.top:
            found.append(abs(one.logprob - other.logprob))
    return found
