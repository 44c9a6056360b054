"""Choose the draft tokens of a call by how many texts run at that moment."""

from __future__ import annotations

from collections.abc import Callable

from saltus.core.control.controller import Controller
from saltus.core.distributions import Step
from saltus.core.tree import Tree
from saltus.engine.decoding_setup import DecodingSetup


class BatchController(Controller):
    """The controller for as many texts as run at the moment, so that drafts give way as a batch fills."""

    def __init__(
        self,
        setup: DecodingSetup,
        num_running: Callable[[], int],
        max_draft_tokens: int | None,
        keeps_states: bool = False,
    ) -> None:
        self._setup, self._num_running, self._keeps_states = setup, num_running, keeps_states
        self._fixed = None if setup.chooses_sizes else setup.controller(1)
        self._together, self._latest = 0, self._fixed
        most = setup.max_draft_tokens
        most = most if max_draft_tokens is None else min(most, max_draft_tokens)
        super().__init__(most, setup.chooses_sizes, setup.acceptance, setup.call_cost, draft_model=setup.draft_model)

    def _current(self) -> Controller:
        if self._fixed is not None:
            return self._fixed
        running = max(self._num_running(), 1)
        together = 1 << (running - 1).bit_length()
        if together != self._together or self._latest is None:
            self._together, self._latest = together, self._setup.controller(together)
            self.call_cost, self.drafting_switch = self._latest.call_cost, self._latest.drafting_switch
        self._latest.num_texts = running
        return self._latest

    def should_draft(self) -> bool:
        return self._current().should_draft()

    def can_pay(self) -> bool:
        return self._current().can_pay()

    def needs_hidden_states(self, max_unread: int) -> bool:
        return self._keeps_states or self._current().needs_hidden_states(max_unread)

    def num_nodes(self, tree: Tree) -> int:
        return min(self._current().num_nodes(tree), self.max_draft_tokens)

    def record(
        self,
        tree: Tree,
        step: Step,
        draft_seconds: float | None = 0.0,
        other_seconds: float = 0.0,
        drafters_on: bool = False,
    ) -> None:
        self._current().record(tree, step, draft_seconds, other_seconds, drafters_on)
