"""Limit the time that the grammar of one text takes from the others: drafting stops first, and then the text ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from saltus.core.constraint import Constraint
from saltus.engine.request import Request

MOST_SECONDS = 2.0  # that a text may use at once, as for the first look at a long literal
SECONDS_PER_CALL = 0.05  # that each call gives back; masks of a usual grammar take a millisecond each
DRAFTING_SECONDS = 1.5  # that must be left for drafts, since a call looks at each draft token that it accepts

Answer = TypeVar("Answer")


@dataclass
class LimitedConstraint:
    """A constraint with an allowance of seconds of the processor, which each call of its text adds to.

    While little is left nothing is drafted from the constraint, which changes no text; a text that has used it up ends
    by a ValueError.
    """

    constraint: Constraint
    request: Request
    clock: Callable[[], float] = time.thread_time  # other threads and processes do not count
    allowance: float = field(default=MOST_SECONDS, init=False)
    num_calls: int = field(default=0, init=False)  # of the request, that are counted in the allowance

    def allowed(self, text: Sequence[int]) -> np.ndarray | None:
        """As the constraint says. Errors: ValueError if it has taken too long."""
        if self._seconds_left() <= 0:
            raise ValueError("the grammar takes too long to follow; simplify it, or shorten its literals")
        return self._timed(lambda: self.constraint.allowed(text))

    def num_allowed(self, text: Sequence[int], tokens: Sequence[int]) -> int:
        """As the constraint says; none, and so no drafts, while little time is left."""
        drafts = self._seconds_left() >= DRAFTING_SECONDS
        return self._timed(lambda: self.constraint.num_allowed(text, tokens)) if drafts else 0

    def fast_forward(self, text: Sequence[int], max_tokens: int) -> Sequence[int]:
        """As the constraint says; none while little time is left."""
        drafts = self._seconds_left() >= DRAFTING_SECONDS
        return self._timed(lambda: self.constraint.fast_forward(text, max_tokens)) if drafts else ()

    def _seconds_left(self) -> float:
        new, self.num_calls = len(self.request.calls) - self.num_calls, len(self.request.calls)
        self.allowance = min(self.allowance + new * SECONDS_PER_CALL, MOST_SECONDS)
        return self.allowance

    def _timed(self, ask: Callable[[], Answer]) -> Answer:
        started = self.clock()
        try:
            return ask()
        finally:
            self.allowance -= self.clock() - started
