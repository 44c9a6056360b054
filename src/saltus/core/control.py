"""Spend nodes where they pay: learn what is accepted and what calls cost, down to plain decoding."""

from __future__ import annotations

from dataclasses import dataclass, field

from saltus.core.forward import Step
from saltus.core.tree import Tree


@dataclass
class Acceptance:
    """How often the drafts of a source are right, by the chance that the source gave them.

    Each bin is a Beta estimate whose prior is the stated chance, worth `prior` observations; old ones fade.
    """

    prior: float = 6.0
    memory: float = 200.0  # observations after which the past has faded to a third
    bins: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)

    @staticmethod
    def _bin(source: str, chance: float) -> tuple[str, int]:
        return source, round(chance * 12)

    def calibrated(self, source: str, chance: float) -> float:
        hits, trials = self.bins.get(self._bin(source, chance), (0.0, 0.0))
        return (hits + self.prior * chance) / (trials + self.prior)

    def observe(self, source: str, chance: float, right: bool) -> None:
        key = self._bin(source, chance)
        hits, trials = self.bins.get(key, (0.0, 0.0))
        fade = 1 - 1 / self.memory
        self.bins[key] = (hits * fade + right, trials * fade + 1)


@dataclass
class Costs:
    """What a call costs in seconds by its nodes: medians of what was measured, straight lines between them."""

    seconds: dict[int, float] = field(default_factory=dict)  # by rows of a call

    def of(self, rows: int) -> float:
        """Seconds of a call of `rows` rows, relative where nothing was measured: 1 + 2 % a row."""
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


@dataclass
class Controller:
    """Choose how many nodes of the offered tree a call should carry. It never changes the text.

    With `adaptive` off the whole tree goes, up to `budget`. With it on, a call carries the nodes that pay, and
    drafting that does not earn its time rests for a while, longer each time.
    """

    budget: int = 16
    adaptive: bool = True
    acceptance: Acceptance = field(default_factory=Acceptance)
    costs: Costs = field(default_factory=Costs)
    gain: float = 1.0  # tokens a second of late, relative to plain decoding
    patience: int = 8  # steps of the next rest
    resting: int = 0

    def drafts(self) -> bool:
        """Should drafters be asked at all?"""
        if self.resting:
            self.resting -= 1
            return False
        return True

    def calibrated(self, source: str, chance: float) -> float:
        """The chance that a draft is right, as learned from this source's record."""
        return self.acceptance.calibrated(source, chance) if self.adaptive else chance

    def size(self, tree: Tree) -> int:
        """How many of the tree's nodes to keep: the count with the most expected tokens a second.

        A call of n nodes costs c(n + 1) and decides one token and Σ values of its nodes.
        """
        if not self.adaptive:
            return min(len(tree.tokens), self.budget)
        best, best_rate, expected = 0, 1 / self.costs.of(1), 1.0
        for n, value in enumerate(tree.values[: self.budget], start=1):
            expected += value
            rate = expected / self.costs.of(n + 1)
            if rate > best_rate:
                best, best_rate = n, rate
        return best

    def observe(self, tree: Tree, step: Step, drafting: float = 0.0) -> None:
        """Learn from a step: was each node right whose parent was, and did drafting (in seconds) pay?"""
        if not self.adaptive:
            return
        accepted = {-1}
        node = step.node
        while node >= 0:
            accepted.add(node)
            node = step.asked.parents[node]
        for i, parent in enumerate(step.asked.parents):
            if parent in accepted and step.asked.depths[i] < len(step.tokens):
                self.acceptance.observe(tree.sources[i], tree.chances[i], i in accepted)
        if drafting and self.costs.seconds:
            spent = drafting + self.costs.of(len(tree.tokens) + 1)
            self.gain += (len(step.tokens) * self.costs.of(1) / spent - self.gain) / 8
            if self.gain < 0.95:
                self.resting, self.gain = self.patience, 1.0
                self.patience = min(self.patience * 2, 256)
