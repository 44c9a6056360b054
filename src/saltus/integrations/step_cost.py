"""Estimate what a step of another engine costs by its number of rows, from the times of its steps alone."""

from __future__ import annotations

from dataclasses import dataclass

ASSUMED_SLOPE = 0.02  # of the cost of one row, for each further row, until steps of several sizes were timed
PRIOR_WEIGHT = 16.0  # of that assumption, in rows²: as one step with 4 rows more than the mean
START_AGAIN_BELOW = 0.25  # of the expected time: the steps before were disturbed, as by a compilation


@dataclass
class StepCost:
    """A line through the times of recent steps; old ones decay.

    Where all steps have the same number of rows, the slope returns to ASSUMED_SLOPE, so drafts that once seemed too
    expensive are tried again.
    """

    decay_steps: float = 64.0  # steps after which the past weighs 1/e
    weight: float = 0.0
    mean_rows: float = 1.0
    mean_seconds: float = 1.0
    row_variance: float = 0.0  # Σ w (rows − mean)²
    covariance: float = 0.0  # Σ w (rows − mean) (seconds − mean)

    @property
    def slope(self) -> float:
        """Seconds of one more row."""
        assumed = self.mean_seconds * ASSUMED_SLOPE / (1 + ASSUMED_SLOPE * (self.mean_rows - 1))
        return max((self.covariance + PRIOR_WEIGHT * assumed) / (self.row_variance + PRIOR_WEIGHT), 0.0)

    def seconds_for(self, rows: int) -> float:
        """Seconds of a step with so many rows; relative ones before any was recorded. Never below a tenth of the mean,
        so that a steep line has no step that costs nothing.
        """
        return max(self.mean_seconds + self.slope * (rows - self.mean_rows), 0.1 * self.mean_seconds)

    def record(self, rows: int, seconds: float) -> None:
        """Add a step; a slow one counts as a factor of 2 at most."""
        if self.weight:
            seconds = min(seconds, 2.0 * self.seconds_for(rows))
            if seconds < START_AGAIN_BELOW * self.seconds_for(rows):
                self.weight = self.row_variance = self.covariance = 0.0
        decay = 1 - 1 / self.decay_steps
        self.weight = self.weight * decay + 1
        rows_off, seconds_off = rows - self.mean_rows, seconds - self.mean_seconds
        self.mean_rows += rows_off / self.weight
        self.mean_seconds += seconds_off / self.weight
        self.row_variance = self.row_variance * decay + rows_off * (rows - self.mean_rows)
        self.covariance = self.covariance * decay + rows_off * (seconds - self.mean_seconds)
