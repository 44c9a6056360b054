"""Record how often draft tokens are accepted, and correct the drafters' own estimates by it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Acceptance:
    """How often the drafts of a source are right, against the chances that the source gave them.

    Each third of the scale of chances keeps how many drafts were right and how many should have been by their
    chances; old observations fade. Where nodes are asked for what they bring later, all of the drafter's tokens are
    counted against what its nodes were said to be worth.
    """

    prior: float = 5.0  # right drafts, as many as stated, that are taken for observed at first
    decay_observations: float = 400.0  # observations after which the past has faded to a third
    counts: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)  # (right, stated)
    payoff_counts: dict[str, tuple[float, float]] = field(default_factory=dict)  # (tokens, stated worths)

    @staticmethod
    def _bucket(source: str, chance: float) -> tuple[str, int]:
        return source, min(int(chance * 3), 2)

    def calibrated_probability(self, source: str, chance: float) -> float:
        """The stated chance, corrected by the record of the source; never certain."""
        right, stated = self.counts.get(self._bucket(source, chance), (0.0, 0.0))
        return min(chance * (right + self.prior) / (stated + self.prior), 0.99)

    def record(self, source: str, chance: float, right: bool) -> None:
        key = self._bucket(source, chance)
        count, stated = self.counts.get(key, (0.0, 0.0))
        fade = 1 - 1 / self.decay_observations
        self.counts[key] = (count * fade + right, stated * fade + chance)

    def calibrated_payoff(self, source: str, stated: float) -> float:
        """The stated worth, corrected by the record of the drafter ("jacobi" of "jacobi/chain")."""
        tokens, worths = self.payoff_counts.get(source.partition("/")[0], (0.0, 0.0))
        return stated * (tokens + self.prior) / (worths + self.prior)

    def record_payoff(self, source: str, tokens: int, worths: float) -> None:
        """A call brought a drafter's tokens for its nodes. A record fades by calls, so what rests is tried again."""
        key = source.partition("/")[0]
        before = self.payoff_counts.get(key, (0.0, 0.0))
        fade = 1 - 1 / self.decay_observations
        self.payoff_counts[key] = (before[0] * fade + tokens, before[1] * fade + worths)
