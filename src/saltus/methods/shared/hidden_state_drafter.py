"""Draft with a network that reads the target's hidden states: keep those that it has not read yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from saltus.core.canvas import Canvas
from saltus.core.distributions import Step
from saltus.core.protocols import DraftGenerator
from saltus.core.tree import Drafts
from saltus.models.cuda.host_copies import to_device

MAX_UNREAD = 32  # hidden states that a draft network reads at once: of a prompt or after a pause, the last ones


@dataclass
class HiddenStateDrafter:
    """Keeps the target's latest hidden states of one text until the draft network reads them, each of them once.

    `draft` gets the canvas, the hidden states before the latest decided tokens [positions, hidden], and the number of
    tokens to draft.
    """

    num_draft_tokens: int  # draft tokens, at most
    draft: Callable[[Canvas, Tensor, int], DraftGenerator]
    max_unread: int = MAX_UNREAD  # set before the first step where the draft network reads more
    output_hidden_states: bool = field(default=True, init=False)
    pending: list[Tensor] = field(default_factory=list, init=False)  # hidden states that were not read yet
    num_tokens_seen: int = field(default=0, init=False)  # decided tokens whose hidden states were collected

    def __call__(self, canvas: Canvas, last: Step | None, max_depth: int) -> Sequence[Drafts] | DraftGenerator:
        if last is None:
            return ()
        self._collect(last, len(canvas.decided_prefix))
        return self._draft(canvas, min(self.num_draft_tokens, max_depth)) if self.pending else ()

    def _draft(self, canvas: Canvas, num_draft_tokens: int) -> DraftGenerator:
        hidden_states = self.pending[0] if len(self.pending) == 1 else torch.cat(self.pending)
        self.pending.clear()
        if len(hidden_states) > self.max_unread:
            hidden_states = hidden_states[-self.max_unread :]
        return (yield from self.draft(canvas, hidden_states, num_draft_tokens))

    def _collect(self, last: Step, num_decided: int) -> None:
        """Keep the states before the decided tokens: of the context that the call read, then of the accepted path."""
        states, nodes = last.outputs.hidden_states, len(last.inputs.tokens)
        if states is None:  # not asked for, since the draft network is off
            return
        context = len(states) - nodes
        rows = [*range(context), *(context + node for node in last.inputs.path(last.last_node))]
        new = num_decided - self.num_tokens_seen
        other = bool(self.pending) and self.pending[-1].shape[-1] != states.shape[-1]  # of fewer layers
        if len(rows) < new or other:  # states in between are missing, so the network starts again from here
            self.pending.clear()
        self.pending.append(state_rows(states, rows[-min(new, self.max_unread) :]))
        del self.pending[: -self.max_unread]  # each has a row or more; without this they pile up while drafting is off
        self.num_tokens_seen = num_decided


def state_rows(x: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows of a tensor, ascending. On the CPU not by torch, whose threads would go on spinning."""
    if len(rows) == len(x):
        return x
    has_no_gaps, on_cpu = bool(rows) and rows[-1] - rows[0] == len(rows) - 1, x.device.type == "cpu"
    if has_no_gaps and (2 * len(rows) >= len(x) or not on_cpu):  # a view, which keeps all of the tensor
        return x[rows[0] : rows[-1] + 1]
    if not on_cpu:
        return x.index_select(0, to_device(np.array(rows, dtype=np.int64), x.device))
    bits = x.view(torch.int16) if x.element_size() == 2 else x
    return torch.from_numpy(bits.numpy()[rows]).view(x.dtype)
