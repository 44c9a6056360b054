"""Spend nodes where they pay: learn what is accepted and what calls cost, down to plain decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from saltus.core.forward import Step
from saltus.core.tree import Tree

TRIAL, LONGEST = 16, 256  # steps: of a trial, and of the longest time without one
LOST = 0.9  # of the other's pace: a trial that falls below is over


@dataclass
class Acceptance:
    """How often the drafts of a source are right, against the chances that the source gave them.

    Each third of the scale of chances keeps how many drafts were right and how many should have been by their
    chances; old observations fade. Where nodes are asked for what they bring later, all of the drafter's tokens are
    counted against what its nodes were said to be worth.
    """

    prior: float = 5.0  # right drafts, as many as stated, that are taken for observed at first
    memory: float = 400.0  # observations after which the past has faded to a third
    counts: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)  # (right, stated)
    returns: dict[str, tuple[float, float]] = field(default_factory=dict)  # (tokens, stated worths)

    @staticmethod
    def _third(source: str, chance: float) -> tuple[str, int]:
        return source, min(int(chance * 3), 2)

    def calibrated(self, source: str, chance: float) -> float:
        """The stated chance, corrected by the record of the source; never certain."""
        right, stated = self.counts.get(self._third(source, chance), (0.0, 0.0))
        return min(chance * (right + self.prior) / (stated + self.prior), 0.99)

    def observe(self, source: str, chance: float, right: bool) -> None:
        key = self._third(source, chance)
        count, stated = self.counts.get(key, (0.0, 0.0))
        fade = 1 - 1 / self.memory
        self.counts[key] = (count * fade + right, stated * fade + chance)

    def worth(self, source: str, stated: float) -> float:
        """The stated worth, corrected by the record of the drafter ("jacobi" of "jacobi/chain")."""
        tokens, worths = self.returns.get(source.partition("/")[0], (0.0, 0.0))
        return stated * (tokens + self.prior) / (worths + self.prior)

    def harvest(self, source: str, tokens: int, worths: float) -> None:
        """A call brought a drafter's tokens for its nodes. A record fades by calls, so what rests is tried again."""
        key = source.partition("/")[0]
        before = self.returns.get(key, (0.0, 0.0))
        fade = 1 - 1 / self.memory
        self.returns[key] = (before[0] * fade + tokens, before[1] * fade + worths)


@dataclass
class Costs:
    """What a call costs in seconds by its rows: as measured at first, then as calls go; straight lines between."""

    seconds: dict[int, float] = field(default_factory=dict)  # by rows of a call
    pace: float = 0.1  # weight of the latest call

    def learn(self, rows: int, seconds: float) -> None:
        """A call took so long: longer texts cost more, and machines drift. Of an outlier a factor of 2 counts."""
        if self.seconds:
            known = min(self.seconds, key=lambda size: abs(math.log(size / rows)))
            change = min(max(seconds / self.of(rows), 0.5), 2.0) - 1
            self.seconds[known] *= 1 + self.pace * change

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
class Pace:
    """Tokens and time of late, in steps of plain decoding. It begins as plain decoding would; old steps fade."""

    prior: float = 8.0  # steps of plain decoding
    memory: float = 64.0  # steps after which the past has faded to a third
    tokens: float = 0.0
    time: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens in the time of a step of plain decoding."""
        return (self.tokens + self.prior) / (self.time + self.prior)

    def observe(self, tokens: int, time: float) -> None:
        self.fade(1 - 1 / self.memory)
        self.tokens, self.time = self.tokens + tokens, self.time + time

    def fade(self, share: float) -> None:
        self.tokens, self.time = self.tokens * share, self.time * share


@dataclass
class Shifts:
    """Let drafters with networks of their own work where that is faster than letting them rest.

    The faster of the two goes on; the other is tried now and then, ever seldomer while it loses, and no longer than
    it takes to see that. In simulation, drafts that gain 9 % where they are always asked for still gain 8.5 %.
    """

    awake: Pace = field(default_factory=Pace)
    asleep: Pace = field(default_factory=Pace)
    working: bool = True
    trying: bool = True
    left: int = TRIAL  # steps of this shift
    patience: int = TRIAL  # steps of the next shift that is no trial

    def work(self) -> bool:
        """Should they be asked in this step?"""
        mine, other = (self.awake, self.asleep) if self.working else (self.asleep, self.awake)
        if not self.left or (self.trying and mine.rate < LOST * other.rate):
            self._change()
        self.left -= 1
        return self.working

    def _change(self) -> None:
        better = self.awake.rate > self.asleep.rate
        if self.trying or self.working != better:
            if self.trying:
                self.patience = TRIAL if self.working == better else min(2 * self.patience, LONGEST)
            self.trying, self.working, self.left = False, better, self.patience
        else:
            self.trying, self.working, self.left = True, not better, TRIAL
            (self.awake if self.working else self.asleep).fade(0.5)  # times may have changed


@dataclass
class Controller:
    """Choose how many nodes of the offered tree a call should carry. It never changes the text.

    With `adaptive` off the whole tree goes, up to `budget`. With it on, a call carries the nodes that pay, and
    drafters with networks of their own rest where they do not earn their time.
    """

    budget: int = 16
    adaptive: bool = True
    acceptance: Acceptance = field(default_factory=Acceptance)
    costs: Costs = field(default_factory=Costs)
    shifts: Shifts = field(default_factory=Shifts)

    def drafts(self) -> bool:
        """Should drafters that call networks of their own be asked at all?"""
        return not self.adaptive or self.shifts.work()

    def calibrated(self, source: str, chance: float) -> float:
        """The chance that a draft is right, as learned from this source's record."""
        return self.acceptance.calibrated(source, chance) if self.adaptive else chance

    def invest(self, source: str, worth: float) -> float:
        """The tokens that a node brings in later calls, as learned from its drafter's record."""
        return self.acceptance.worth(source, worth) if self.adaptive else worth

    def size(self, tree: Tree) -> int:
        """How many of the tree's nodes to keep: the count with the most expected tokens a second.

        A call of n nodes costs c(n + 1) and decides one token and Σ values of its nodes. Where tokens were drawn
        from laws of their own, looking ends at the first node that does not pay: beyond it may hang its children,
        whose values know what it drew, and `reject` forbids to drop a node for that.
        """
        if not self.adaptive:
            return min(len(tree.tokens), self.budget)
        drawn = any(law is not None for law in tree.laws)
        best, best_rate, expected = 0, 1 / self.costs.of(1), 1.0
        for n, value in enumerate(tree.values[: self.budget], start=1):
            expected += value
            rate = expected / self.costs.of(n + 1)
            if rate > best_rate:
                best, best_rate = n, rate
            elif drawn:
                break
        return best

    def observe(self, tree: Tree, step: Step, drafting: float = 0.0) -> None:
        """Learn from a step: which nodes of the tree, asked or not, were right, and did drafting (in seconds) pay?"""
        if not self.adaptive:
            return
        decided, asked, rows = step.tokens.tolist(), step.asked.drafts, len(step.asked.tokens) + 1
        if step.reply.read == 1 and step.reply.rows == rows:  # not a prompt, nor shared with other texts
            self.costs.learn(rows, step.reply.seconds)
        depths: dict[int, int] = {-1: -1}  # of the nodes that say what was decided
        for node, parent in enumerate(tree.parents):
            depth = depths.get(parent, len(decided)) + 1
            if depth < len(decided):
                right = tree.tokens[node] == decided[depth]
                self.acceptance.observe(tree.sources[node], tree.chances[node], right)
                if right:
                    depths[node] = depth
        for investor in set(tree.investors) - {""}:
            mine = [node for node in range(asked) if _same_drafter(tree.sources[node], investor)]
            worths = sum((tree.worths[node] for node in range(asked) if tree.investors[node] == investor), 0.0)
            self.acceptance.harvest(investor, sum(node in depths for node in mine), worths)
        if self.costs.seconds:
            spent = drafting + self.costs.of(len(step.asked.tokens) + 1)
            pace = self.shifts.awake if drafting or step.asked.guided else self.shifts.asleep
            pace.observe(len(decided) - step.closed, spent / self.costs.of(1))


def _same_drafter(one: str, other: str) -> bool:
    return one.partition("/")[0] == other.partition("/")[0]
