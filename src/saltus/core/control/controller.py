"""Choose how many draft tokens a verification call carries, down to plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from saltus.core.control.acceptance import Acceptance
from saltus.core.control.call_cost import CallCost
from saltus.core.control.draft_model_record import FIRST_CALL_TOKENS, FIRST_STEPS, DraftModelRecord
from saltus.core.control.drafting_switch import DraftingSwitch
from saltus.core.distributions import Step
from saltus.core.native_tree import best_size, grow_natively
from saltus.core.tree import Drafts, Tree, grow_tree

# Of the time of a plain decoding step: where each draft token takes more, none is looked for. All texts of a batch wait
# while the host looks for drafts of one, of 16 a tenth of a call in all, and drafts that are right nine times in ten
# are few. So this is the limit of a large batch, and a text alone has another.
MAX_DRAFT_COST, MAX_DRAFT_COST_ALONE = 0.55, 0.9
CHEAP_DRAFT = 0.1  # of the same time: where a draft token takes less, no call is made without any to see what it takes
PROMPT_ROWS = 32  # of a call in which a row costs about as much as in one that reads a prompt
EMPTY_TREE = grow_tree((), 0, 0)


@dataclass
class Controller:
    """Chooses how many nodes of the draft tree a call verifies.

    Under `match` it cannot change the text. Under `reject` the tree decides which tokens are sampled, so the engine
    then uses one that is not adaptive.

    Without `adaptive` a call carries the whole tree, up to `max_draft_tokens` nodes. With it, a call carries the nodes
    that pay, and drafters that take time (a draft model, queries, a table to keep) are switched off while they do not
    pay for it.
    """

    max_draft_tokens: int = 16
    adaptive: bool = True
    acceptance: Acceptance = field(default_factory=Acceptance)
    call_cost: CallCost = field(default_factory=CallCost)
    # texts that are decoded together, one after another outside of calls; costs are by the rows of each
    batch_size: int = 1
    draft_model: DraftModelRecord = field(default_factory=DraftModelRecord)  # of one that reads the text itself
    num_texts: int = field(init=False)  # that really are: as many as `batch_size`, or a few less
    drafting_switch: DraftingSwitch = field(init=False)
    num_steps: int = field(default=0, init=False)  # that were recorded, of all texts

    def __post_init__(self) -> None:
        self.num_texts = self.batch_size
        self.drafting_switch = DraftingSwitch(batch_size=self.batch_size)

    def should_draft(self) -> bool:
        """True if drafters that can be switched off should draft in the next step; to be asked once a step."""
        return not self.adaptive or self.drafting_switch.should_draft()

    def draft_call_pays(self, chance: float, seconds: float, num_drafted: int) -> bool:
        """True if one more call of a draft model may bring more tokens than are decided in the time that it costs.

        It costs its own seconds, and a row of the verification call. `chance` is the probability that what was drafted
        in this step, `num_drafted` tokens, is accepted, and so the most that a further token is worth.
        """
        if not self.adaptive or not self.call_cost.seconds:
            return True
        row = self.call_cost.seconds_for(num_drafted + 2) - self.call_cost.seconds_for(num_drafted + 1)
        return chance >= self._tokens_in(seconds + row)

    def first_draft_call_pays(self, offered: Sequence[Drafts], max_depth: int, seconds: float) -> bool:
        """True if a draft model should be called in this step, given what drafters without one offer.

        It can bring tokens only where those are wrong. `seconds` is what such a call took before; 0: not known yet.
        """
        if not (self.adaptive and offered and seconds):
            return True
        unknown = _unknown(self.offered_tree(offered, max_depth))
        return self.draft_call_pays(FIRST_CALL_TOKENS * unknown, seconds, 0)

    def draft_model_saves(self, offered: Tree, seconds: float) -> float:
        """Tokens that calls of a draft model that reads the text bring in a step, less those decided in their time.

        `offered` is the tree of other drafters. `seconds` is what such calls took in a step before; 0: not known yet.
        """
        record, cost = self.draft_model, self.call_cost
        if not (self.adaptive and cost.seconds):
            return 0.0
        seconds = seconds or record.step_seconds or (record.relative_size or 0.0) * cost.seconds_for(1)
        return record.tokens_of_calls(_unknown(offered)) - self._tokens_in(seconds)

    def record_draft_calls(self, before: Tree, after: Tree, seconds: float) -> None:
        """Record the calls of such a draft model in a step: the trees that are offered before and after them."""
        if self.adaptive and self.call_cost.seconds:
            gain = self._tokens_saved_by(after) - self._tokens_saved_by(before)
            self.draft_model.record_calls(_unknown(before), gain, seconds)

    def _tokens_saved_by(self, tree: Tree) -> float:
        """Tokens that the next call is expected to decide with a tree, less those that are decided in its time."""
        size = self.num_nodes(tree)
        return sum(tree.expected_tokens[:size]) - self._tokens_in(self.call_cost.seconds_for(size + 1))

    def _tokens_in(self, seconds: float) -> float:
        """Tokens that are decided in so many seconds."""
        return self.drafting_switch.with_drafts.rate * seconds / self.call_cost.seconds_for(1)

    def reading_pays(self, num_unread: int, num_open: int, drafts_alone: bool) -> bool:
        """True if a draft model should read `num_unread` tokens of a text, of which `num_open` are still to be decided.

        All texts of a batch wait for it. Unless it drafts alone, the first steps show what others leave to it.
        """
        record, cost = self.draft_model, self.call_cost
        if not self.adaptive or not cost.seconds:
            return True
        token_seconds = record.token_seconds
        if not token_seconds:
            if record.relative_size is None:
                return True
            token_seconds = record.relative_size * cost.seconds_for(PROMPT_ROWS) / PROMPT_ROWS
        if record.steps < FIRST_STEPS and not drafts_alone:
            return False
        num_waiting = self.drafting_switch.batch_size
        return record.tokens_saved(num_open) >= num_waiting * self._tokens_in(num_unread * token_seconds)

    def needs_hidden_states(self, max_unread: int) -> bool:
        """False while draft models are off for so many steps that they never read this call's hidden states.

        When they draft again they read the latest `max_unread` states.
        """
        return not self.adaptive or self.drafting_switch.steps_without_drafts <= max_unread * self.batch_size

    def calibrated_probability(self, source: str, stated: float) -> float:
        """The acceptance probability of a draft token, corrected by the source's record."""
        return self.acceptance.calibrated_probability(source, stated) if self.adaptive else stated

    def calibrated_payoff(self, source: str, stated: float) -> float:
        """The tokens that verifying a node saves in later calls, corrected by the drafter's record."""
        return self.acceptance.calibrated_payoff(source, stated) if self.adaptive else stated

    def min_expected_tokens(self) -> float:
        """A node with fewer cannot pay for its row, even if rows cost as little as at the best number of rows."""
        if not self.adaptive or self.call_cost.should_try_more_rows:
            return 0.0
        return self.call_cost.least_row_seconds() / self.call_cost.seconds_for(1)

    def can_pay(self) -> bool:
        """False while rows are so expensive, as in a full batch, that hardly any draft token could pay for its own.

        After many calls without drafts some are tried, and after many of one size a call without any: what rows cost
        may have changed, or never have been known.
        """
        if not self.adaptive or self.call_cost.should_try_more_rows:
            return True
        cost = self.call_cost.least_draft_seconds() / self.call_cost.seconds_for(1)
        limit = MAX_DRAFT_COST + (MAX_DRAFT_COST_ALONE - MAX_DRAFT_COST) / self.batch_size
        return cost < (CHEAP_DRAFT if self.call_cost.should_try_fewer_rows else limit)

    def offered_tree(self, drafts: Sequence[Drafts], max_depth: int) -> Tree:
        """The tree of all drafts, at most `max_draft_tokens` nodes, by what their sources' records are worth."""
        if not drafts:
            return EMPTY_TREE
        least, most = self.min_expected_tokens(), self.max_draft_tokens
        acceptance = self.acceptance
        records = acceptance.counts if self.adaptive else None
        tree = grow_natively(drafts, most, max_depth, records, acceptance.prior, least)
        if tree is None:
            tree = grow_tree(drafts, most, max_depth, self.calibrated_probability, self.calibrated_payoff, least)
        return tree

    def num_nodes(self, tree: Tree) -> int:
        """How many of the tree's nodes to keep: the number with the most expected tokens a second.

        A call with n nodes costs c(n + 1) and is expected to decide 1 + Σ expected_tokens. For sampled drafts the
        search stops at the first node that does not pay: the values of its children depend on the sampled token, and
        pruning by them would bias rejection sampling.
        """
        if not self.adaptive:
            return min(len(tree.tokens), self.max_draft_tokens)
        if not tree.tokens:
            return 0
        sampled = any(tree.distributions)
        least = int(self.call_cost.should_try_more_rows and not sampled)
        if not sampled:
            size = best_size(self.call_cost.seconds, tree.expected_tokens[: self.max_draft_tokens])
            if size is not None:
                return max(size, least)
        best, best_rate, expected = least, 1 / self.call_cost.seconds_for(1), 1.0
        for n, value in enumerate(tree.expected_tokens[: self.max_draft_tokens], start=1):
            expected += value
            rate = expected / self.call_cost.seconds_for(n + 1)
            if rate > best_rate:
                best, best_rate = n, rate
            elif sampled:
                break
        return best

    def record(
        self,
        tree: Tree,
        step: Step,
        draft_seconds: float | None = 0.0,
        other_seconds: float = 0.0,
        drafters_on: bool = False,
    ) -> None:
        """Record a step: which nodes of the whole tree were right, and whether drafting paid for its seconds.

        `draft_seconds` were spent in calls of draft models (None: they read a prompt too, and the step says nothing of
        what drafting costs), `other_seconds` outside of calls, for this text alone: the others of a batch wait for
        them. `drafters_on`: those that can be switched off were not.
        """
        if not self.adaptive:
            return
        self.num_steps += 1
        if step.outputs.context_tokens_read == 1 and self.num_steps % self.num_texts == 0:
            self._record_call(step)  # one for each call of a batch
        if not tree.tokens and not self.can_pay():
            return  # nothing was tried
        decided, num_verified = step.tokens.tolist(), step.inputs.num_draft_tokens
        depths = self.acceptance.record_tree(tree, decided)
        for source in set(tree.payoff_sources) - {""}:
            nodes = [node for node in range(num_verified) if _same_drafter(tree.sources[node], source)]
            payoffs = sum(
                (tree.payoffs[node] for node in range(num_verified) if tree.payoff_sources[node] == source), 0.0
            )
            self.acceptance.record_payoff(source, sum(node in depths for node in nodes), payoffs)
        if self.call_cost.seconds and draft_seconds is not None:
            spent = (
                draft_seconds
                + self.batch_size * other_seconds
                + self.call_cost.seconds_for(len(step.inputs.tokens) + 1)
            )
            switch = self.drafting_switch
            throughput = switch.with_drafts if drafters_on else switch.without_drafts
            throughput.record(_tokens_of(tree, step), spent / self.call_cost.seconds_for(1))

    def _record_call(self, step: Step) -> None:
        """Record what a call cost by its rows for each text.

        Calls in which another text read a prompt, and has more rows than drafts, say nothing of drafts.
        """
        rows, num_rows = len(step.inputs.tokens) + 1, step.outputs.num_rows
        most = rows if self.num_texts == 1 else self.num_texts * max(rows, 1 + self.max_draft_tokens)
        if rows <= num_rows <= most:
            self.call_cost.record(num_rows / self.num_texts, step.outputs.seconds)


def _tokens_of(tree: Tree, step: Step) -> float:
    """The mean of the tokens that a step decided and of those that it was expected to; the former with payoffs.

    Acceptance records keep the expectation true on average, and it varies far less: by what steps decided alone, a
    trial of 16 steps would often be lost by chance. By the expectation alone, a drafter that has become better would
    have to be used for long to be seen.
    """
    num_verified, decided = step.inputs.num_draft_tokens, float(len(step.tokens) - step.num_padding_tokens)
    if any(tree.payoff_sources[:num_verified]):
        return decided
    return (decided + 1 + sum(tree.expected_tokens[:num_verified])) / 2


def _unknown(tree: Tree) -> float:
    """The chance that no node of a tree is the next token."""
    nodes = zip(tree.expected_tokens, tree.parents, strict=True)
    return max(1.0 - sum(expected for expected, parent in nodes if parent < 0), 0.0)


def _same_drafter(source: str, other: str) -> bool:
    return source.partition("/")[0] == other.partition("/")[0]
