"""Choose the draft tokens of a call by how many texts run at that moment, so that drafts give way as a batch fills."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from saltus.core.control.controller import Controller
from saltus.core.tree import Tree
from saltus.engine.decoding_setup import DecodingSetup


def controller_in_batch(
    setup: DecodingSetup, num_running: Callable[[], int], max_draft_tokens: int | None, keeps_states: bool = False
) -> Controller:
    """The controller of one text, beside as many others as `num_running` says whenever it is asked.

    With `keeps_states` the hidden states of every call are needed. `max_draft_tokens` is a limit of this text's own.
    """
    most = setup.max_draft_tokens if max_draft_tokens is None else min(setup.max_draft_tokens, max_draft_tokens)
    if not setup.chooses_sizes:
        return Controller(most, False, setup.acceptance, draft_model=setup.draft_model)
    return BatchController(setup, num_running, most, keeps_states)


class BatchController(Controller):
    """Decides as the setup's controller for 1, 2, 4, … texts: the one for as many as run at the moment, or more.

    Whether calls of a draft model pay, which it inherits, goes by the costs of that controller, too.
    """

    def __init__(
        self, setup: DecodingSetup, num_running: Callable[[], int], max_draft_tokens: int, keeps_states: bool
    ) -> None:
        super().__init__(max_draft_tokens, True, setup.acceptance, setup.call_cost, draft_model=setup.draft_model)
        self.setup, self.num_running, self.keeps_states = setup, num_running, keeps_states

    def _shared(self) -> Controller:
        """The controller that all texts of such a batch share."""
        running = max(self.num_running(), 1)
        shared = self.setup.controller(1 << (running - 1).bit_length())
        shared.num_texts = running
        self.call_cost, self.drafting_switch = shared.call_cost, shared.drafting_switch
        return shared

    def should_draft(self) -> bool:
        return self._shared().should_draft()

    def can_pay(self) -> bool:
        return self._shared().can_pay()

    def needs_hidden_states(self, max_unread: int) -> bool:
        return self.keeps_states or self._shared().needs_hidden_states(max_unread)

    def num_nodes(self, tree: Tree) -> int:
        return min(self._shared().num_nodes(tree), self.max_draft_tokens)

    def record(self, *step: Any, **settings: Any) -> None:
        self._shared().record(*step, **settings)
