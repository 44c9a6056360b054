"""Record how often draft tokens are accepted, and correct the drafters' estimates accordingly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from saltus.core.tree import Tree


@dataclass
class Acceptance:
    """How often the drafts of each source are accepted, compared with the probabilities that the source stated.

    For each third of the probability scale it keeps the number of accepted drafts and the number expected by the stated
    probabilities; old observations decay. For drafters that state payoffs it compares their accepted tokens with the
    sum of these.
    """

    prior: float = 5.0  # accepted drafts, as many as expected, that count as observed at the start
    decay_observations: float = 400.0  # observations after which the past weighs 1/e
    # (accepted, expected) by (source, third)
    counts: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    payoff_counts: dict[str, tuple[float, float]] = field(default_factory=dict)

    @staticmethod
    def _bucket(source: str, probability: float) -> tuple[str, int]:
        return source, min(int(probability * 3), 2)

    def calibrated_probability(self, source: str, stated: float) -> float:
        """The stated acceptance probability, corrected by the record of the source; at most 0.99."""
        accepted, expected = self.counts.get(self._bucket(source, stated), (0.0, 0.0))
        return min(stated * (accepted + self.prior) / (expected + self.prior), 0.99)

    def record(self, source: str, stated: float, accepted: bool) -> None:
        """Add one draft token with its stated probability."""
        key = self._bucket(source, stated)
        count, expected = self.counts.get(key, (0.0, 0.0))
        decay = 1 - 1 / self.decay_observations
        self.counts[key] = (count * decay + accepted, expected * decay + stated)

    def record_tree(self, tree: Tree, decided: Sequence[int]) -> dict[int, int]:
        """Add the nodes of a draft tree whose parents were right, given the tokens that a step decided.

        Returns the depth of each node that was right, and −1 for node −1, the tokens decided before.
        """
        depths = {-1: -1}
        for node, parent in enumerate(tree.parents):
            depth = depths.get(parent, len(decided)) + 1
            if depth < len(decided):
                right = tree.tokens[node] == decided[depth]
                self.record(tree.sources[node], tree.acceptance_probabilities[node], right)
                if right:
                    depths[node] = depth
        return depths

    def calibrated_payoff(self, source: str, stated: float) -> float:
        """The stated payoff, corrected by the record of the drafter ("jacobi" for "jacobi/chain")."""
        tokens, payoffs = self.payoff_counts.get(source.partition("/")[0], (0.0, 0.0))
        return stated * (tokens + self.prior) / (payoffs + self.prior)

    def record_payoff(self, source: str, tokens: int, payoffs: float) -> None:
        """Add one call: a drafter's accepted tokens, and the payoffs stated for its nodes.

        Records decay with every call, so that a drafter that is not used is tried again.
        """
        key = source.partition("/")[0]
        before = self.payoff_counts.get(key, (0.0, 0.0))
        decay = 1 - 1 / self.decay_observations
        self.payoff_counts[key] = (before[0] * decay + tokens, before[1] * decay + payoffs)
