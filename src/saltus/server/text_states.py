"""Keep the hidden states behind a text while it is decoded, as teacher data for a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from saltus.core.distributions import Step
from saltus.engine.request import Request
from saltus.methods.shared.context_rows import select_hidden_states
from saltus.methods.shared.hidden_state_drafter import MAX_UNREAD, state_rows
from saltus.models.protocols import DrafterHost
from saltus.training.data.recent_texts import RecentText

MAX_TOKENS = 384  # of a completion that are kept; a training window lies in as many
MIN_TOKENS = 9  # of a completion that is a training text


@dataclass
class TextStates:
    """The target's states before the decided tokens of one text, from the last `MAX_UNREAD` of its prompt on."""

    target: DrafterHost
    selected: Sequence[int | None]  # those that the drafter reads; None: the last
    rows: list[Tensor] = field(default_factory=list, init=False)
    num_decided: int = field(default=0, init=False)  # tokens up to the last whose state is before
    complete: bool = field(default=True, init=False)

    def record(self, step: Step) -> None:
        """Keep the states of a call; called after each."""
        states, begin = step.outputs.hidden_states, len(step.canvas.decided_prefix)
        end = begin + len(step.tokens)
        if states is None or not self.complete or sum(map(len, self.rows)) >= MAX_TOKENS + MAX_UNREAD:
            return
        context, path = len(states) - len(step.inputs.tokens), step.inputs.path(step.last_node)
        rows = [*range(context), *(context + node for node in path)]
        del rows[len(rows) - max(len(path) + 1 - len(step.tokens), 0) :]  # before tokens after the text's end
        new = end - self.num_decided if self.rows else min(len(rows), MAX_UNREAD + len(path))
        if new > len(rows):  # a call without states came between
            self.complete = False
            return
        kept = state_rows(states, rows[len(rows) - new :])
        self.rows.append(select_hidden_states(kept, self.target.layers_of(kept), self.selected).cpu())
        self.num_decided = end

    def text(self, request: Request) -> RecentText | None:
        """The text with its states; None if it is too short or states are missing."""
        if not self.complete or not self.rows:
            return None
        states = torch.cat(self.rows).to(torch.bfloat16)
        tokens = np.array([*request.prompt, *request.tokens][: self.num_decided], dtype=np.int64)
        tokens = tokens[-1 - len(states) :]
        prompt_length = len(tokens) - (self.num_decided - len(request.prompt))
        if len(tokens) - prompt_length < MIN_TOKENS or prompt_length < 1:
            return None
        return RecentText(tokens, states.view(torch.int16).numpy(), prompt_length, request.sampling.temperature)
