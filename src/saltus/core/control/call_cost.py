"""Record what a forward pass costs by its number of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class CallCost:
    """Seconds of a call by its number of rows: calibrated once, updated by calls, linear between known row counts."""

    seconds: dict[int, float] = field(default_factory=dict)  # by rows of a call
    update_rate: float = 0.1  # weight of the latest call

    def record(self, rows: int, seconds: float) -> None:
        """Update by a call, since longer texts cost more and machines drift; an outlier counts as a factor of 2."""
        if self.seconds:
            known = min(self.seconds, key=lambda size: abs(math.log(size / rows)))
            change = min(max(seconds / self.seconds_for(rows), 0.5), 2.0) - 1
            self.seconds[known] *= 1 + self.update_rate * change

    def seconds_for(self, rows: int) -> float:
        """Seconds of a call of `rows` rows; if nothing was measured, relative ones: 1 + 2 % for each row."""
        if not self.seconds:
            return 1 + 0.02 * rows
        known = sorted(self.seconds)
        above = next((n for n in known if n >= rows), None)
        below = next((n for n in reversed(known) if n <= rows), None)
        if above is None:
            last = known[-1]
            slope = (self.seconds[last] - self.seconds[known[0]]) / max(last - known[0], 1)
            return self.seconds[last] + max(slope, self.seconds[last] * 0.01) * (rows - last)
        if below is None or above == below:
            return self.seconds[above]
        share = (rows - below) / (above - below)
        return self.seconds[below] * (1 - share) + self.seconds[above] * share
