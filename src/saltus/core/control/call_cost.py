"""Record what a forward pass costs by its number of rows."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

UPDATE_RATE = 0.1  # weight of the latest call
RISE_RATE = 0.3  # weight of the difference of the latest two calls, after LONG_ALIKE calls of one size
LEAST_RATE = 0.05  # the same, where sizes have just differed
LONG_ALIKE = 64  # calls of one size after which another one is worth a call
TRIAL_CALLS = 4  # that may have another size then
LEAST_RISE = 0.05  # that the seconds of a row are corrected by, of those of the smallest call; they may seem to be 0
CLEAR_RISE = 0.1  # a difference of so much, of the smallest call, has its full weight


@dataclass
class CallCost:
    """Seconds of a call by its number of rows: calibrated once, updated by calls, linear between known row counts.

    Each call updates all sizes alike: a machine under load and longer texts slow calls of all sizes, also those that
    are not used at present. What more rows cost is learned from successive calls of different sizes alone, since load
    hits both. By their difference the rise above the smallest call changes, in proportion. More rows never cost less.
    """

    seconds: dict[int, float] = field(default_factory=dict)  # by rows of a call
    calls_alike: float = field(default=0.0, init=False)  # calls since sizes differed; fewer where they differed little
    _latest: tuple[float, float] = field(default=(0.0, 0.0), init=False, repr=False)  # rows and seconds; 0: none yet

    @property
    def should_try_more_rows(self) -> bool:
        """True for a few calls after many of the smallest size: a larger one would tell what rows cost."""
        return self._should_vary_rows and self._latest[0] <= min(self.seconds)

    @property
    def should_try_fewer_rows(self) -> bool:
        """True for a few calls after many of one larger size."""
        return self._should_vary_rows and self._latest[0] > min(self.seconds)

    @property
    def _should_vary_rows(self) -> bool:
        return self.calls_alike % LONG_ALIKE >= LONG_ALIKE - TRIAL_CALLS

    def record(self, rows: int | float, seconds: float) -> None:
        """Update by a call; an outlier counts as a factor of 2, and as a rise of 0 or twice the known one."""
        if not self.seconds:
            return
        change = 1 + UPDATE_RATE * (min(max(seconds / self.seconds_for(rows), 0.5), 2.0) - 1)
        steeper, least = self._steeper(rows, seconds), 0.0
        fewest, alone = min(self.seconds.items())
        for size, known in sorted(self.seconds.items()):
            rise = known - alone + LEAST_RISE * alone * (size - fewest)
            self.seconds[size] = least = max((known + steeper * rise) * change, least)

    def _steeper(self, rows: int | float, seconds: float) -> float:
        """By which share rows seem to cost more than is known, weighted, after this call and the one before it."""
        before, self._latest = self._latest, (rows, seconds)
        self.calls_alike += 1
        if before[0] in (0, rows):
            return 0.0
        alone = min(self.seconds.items())[1]
        known = self.seconds_for(rows) - self.seconds_for(before[0])
        rise = known + LEAST_RISE * alone * (rows - before[0])
        weight = min(abs(rise) / (CLEAR_RISE * alone), 1.0)
        rate = min(max(RISE_RATE * self.calls_alike / LONG_ALIKE, LEAST_RATE), RISE_RATE)
        self.calls_alike *= 1 - weight
        return rate * weight * min(max((seconds - before[1] - known) / rise, -1.0), 1.0)

    def seconds_for(self, rows: int | float) -> float:
        """Seconds of a call of `rows` rows; if nothing was measured, relative ones: 1 + 2 % for each row."""
        if not self.seconds:
            return 1 + 0.02 * rows
        known = sorted(self.seconds)
        place = bisect_left(known, rows)
        if place == len(known):
            last = known[-1]
            slope = (self.seconds[last] - self.seconds[known[0]]) / max(last - known[0], 1)
            return self.seconds[last] + max(slope, self.seconds[last] * 0.01) * (rows - last)
        above, below = known[place], known[place - 1]
        if not place or above == rows:
            return self.seconds[above]
        share = (rows - below) / (above - below)
        return self.seconds[below] * (1 - share) + self.seconds[above] * share

    def least_row_seconds(self) -> float:
        """Seconds of one more row between known row counts, where it costs least; 0 if nothing was measured."""
        known = sorted(self.seconds.items())
        return min(((high - low) / (more - rows) for (rows, low), (more, high) in pairwise(known)), default=0.0)

    def least_draft_seconds(self) -> float:
        """Seconds that a draft token adds to a call of the size at which it adds least; 0 if none was measured."""
        (fewest, alone), *more = sorted(self.seconds.items()) or [(1, 0.0)]
        return min(((seconds - alone) / (rows - fewest) for rows, seconds in more), default=0.0)


def never_falling(seconds: Mapping[int, float]) -> dict[int, float]:
    """The times by numbers of rows, none above that of a larger number."""
    least, lowered = math.inf, {}
    for rows in sorted(seconds, reverse=True):
        least = min(least, seconds[rows])
        lowered[rows] = least
    return dict(sorted(lowered.items()))
