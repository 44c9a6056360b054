"""Record what a forward pass costs by its number of rows."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

UPDATE_RATE = 0.1  # weight of the latest call
LEVEL_SHARE = 0.75  # of a change that sizes share: in simulations with noise, drift and steps half the loss of 0.5


@dataclass
class CallCost:
    """Seconds of a call by its number of rows: calibrated once, updated by calls, linear between known row counts.

    A call updates the nearest known row count, and all others by most of that: a machine under load slows calls of all
    sizes, also those that are not used at present. More rows never cost less: a size that seems to cost more than a
    larger one was measured in a disturbed moment. If the first calls take less than at the calibration, all of it was
    disturbed, and all sizes fall alike.
    """

    seconds: dict[int, float] = field(default_factory=dict)  # by rows of a call
    first_calls: int = field(default=40, init=False)  # calls to come that judge the calibration

    def record(self, rows: int | float, seconds: float) -> None:
        """Update by a call, since longer texts cost more and machines drift; an outlier counts as a factor of 2."""
        if self.seconds:
            nearest = min(self.seconds, key=lambda size: abs(math.log(size / rows)))
            change = UPDATE_RATE * (min(max(seconds / self.seconds_for(rows), 0.5), 2.0) - 1)
            updated = self.seconds[nearest] * (1 + change)
            share = 1.0 if change < 0 < self.first_calls else LEVEL_SHARE
            self.first_calls -= 1
            for size, known in self.seconds.items():
                moved = known * (1 + change * share)
                self.seconds[size] = updated if size == nearest or (moved > updated) == (size < nearest) else moved

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
