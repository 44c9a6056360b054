"""Choose how many draft tokens a verification call carries, down to plain decoding."""

from __future__ import annotations

from dataclasses import dataclass, field

from saltus.core.control.acceptance import Acceptance
from saltus.core.control.call_cost import CallCost
from saltus.core.control.drafting_switch import DraftingSwitch
from saltus.core.distributions import Step
from saltus.core.tree import Tree


@dataclass
class Controller:
    """Choose how many nodes of the offered tree a call should carry. It never changes the text.

    With `adaptive` off the whole tree goes, up to `budget`. With it on, a call carries the nodes that pay, and
    drafters with networks of their own rest where they do not earn their time.
    """

    budget: int = 16
    adaptive: bool = True
    acceptance: Acceptance = field(default_factory=Acceptance)
    call_cost: CallCost = field(default_factory=CallCost)
    drafting_switch: DraftingSwitch = field(default_factory=DraftingSwitch)

    def should_draft(self) -> bool:
        """Should drafters that call networks of their own be asked at all?"""
        return not self.adaptive or self.drafting_switch.should_draft()

    def calibrated_probability(self, source: str, chance: float) -> float:
        """The chance that a draft is right, as learned from this source's record."""
        return self.acceptance.calibrated_probability(source, chance) if self.adaptive else chance

    def calibrated_payoff(self, source: str, worth: float) -> float:
        """The tokens that a node brings in later calls, as learned from its drafter's record."""
        return self.acceptance.calibrated_payoff(source, worth) if self.adaptive else worth

    def num_nodes(self, tree: Tree) -> int:
        """How many of the tree's nodes to keep: the count with the most expected tokens a second.

        A call of n nodes costs c(n + 1) and decides one token and Σ values of its nodes. Where tokens were drawn
        from laws of their own, looking ends at the first node that does not pay: beyond it may hang its children,
        whose values know what it drew, and `reject` forbids to drop a node for that.
        """
        if not self.adaptive:
            return min(len(tree.tokens), self.budget)
        drawn = any(distribution is not None for distribution in tree.distributions)
        best, best_rate, expected = 0, 1 / self.call_cost.seconds_for(1), 1.0
        for n, value in enumerate(tree.expected_tokens[: self.budget], start=1):
            expected += value
            rate = expected / self.call_cost.seconds_for(n + 1)
            if rate > best_rate:
                best, best_rate = n, rate
            elif drawn:
                break
        return best

    def record(self, tree: Tree, step: Step, drafting: float = 0.0) -> None:
        """Learn from a step: which nodes of the tree, asked or not, were right, and did drafting (in seconds) pay?"""
        if not self.adaptive:
            return
        decided, inputs, rows = step.tokens.tolist(), step.inputs.num_draft_tokens, len(step.inputs.tokens) + 1
        if (
            step.outputs.context_tokens_read == 1 and step.outputs.num_rows == rows
        ):  # not a prompt, nor shared with other texts
            self.call_cost.record(rows, step.outputs.seconds)
        depths: dict[int, int] = {-1: -1}  # of the nodes that say what was decided
        for node, parent in enumerate(tree.parents):
            depth = depths.get(parent, len(decided)) + 1
            if depth < len(decided):
                right = tree.tokens[node] == decided[depth]
                self.acceptance.record(tree.sources[node], tree.acceptance_probabilities[node], right)
                if right:
                    depths[node] = depth
        for investor in set(tree.payoff_sources) - {""}:
            mine = [node for node in range(inputs) if _same_drafter(tree.sources[node], investor)]
            worths = sum((tree.payoffs[node] for node in range(inputs) if tree.payoff_sources[node] == investor), 0.0)
            self.acceptance.record_payoff(investor, sum(node in depths for node in mine), worths)
        if self.call_cost.seconds:
            spent = drafting + self.call_cost.seconds_for(len(step.inputs.tokens) + 1)
            pace = (
                self.drafting_switch.with_drafts
                if drafting or step.inputs.has_token_queries
                else self.drafting_switch.without_drafts
            )
            pace.record(len(decided) - step.num_forced_tokens, spent / self.call_cost.seconds_for(1))


def _same_drafter(one: str, other: str) -> bool:
    return one.partition("/")[0] == other.partition("/")[0]
