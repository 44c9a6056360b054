"""Drafters whose network reads the target's states: keep those that it has not been shown yet."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch

from saltus.core.canvas import Canvas
from saltus.core.forward import Forward, Reply, Step
from saltus.core.noise import Noise
from saltus.core.rules import Rule
from saltus.core.sampling import Sampling
from saltus.core.tree import Branch


@dataclass
class Listening:
    """Drafts of one text. Another method's `offer` makes branches; it shows the network `unheard()`, once."""

    noise: Noise
    sampling: Sampling
    rule: Rule
    length: int  # tokens drafted, at most
    features: bool = field(default=True, init=False)  # the target is to give out its states
    states: list[torch.Tensor] = field(default_factory=list, init=False)  # that the network has not been shown
    heard: int = field(default=0, init=False)  # decided tokens before which a state was given out

    def __call__(
        self, canvas: Canvas, last: Step | None, room: int
    ) -> Sequence[Branch] | Generator[Forward, Reply, Sequence[Branch]]:
        if last is None:
            return ()
        self._hear(last, len(canvas.decided))
        return self.offer(canvas, min(self.length, room))

    def offer(self, canvas: Canvas, length: int) -> Generator[Forward, Reply, Sequence[Branch]]:
        """Branches of up to `length` tokens."""
        raise NotImplementedError

    def unheard(self) -> torch.Tensor:
        """The states before the last decided tokens that the network has not been shown, [slots, states]."""
        found = torch.cat(self.states)
        self.states.clear()
        return found

    def _hear(self, last: Step, decided: int) -> None:
        """Keep the states before the tokens that are decided now: of what the call read, then of the accepted path."""
        states, nodes = last.reply.features, len(last.asked.tokens)
        assert states is not None
        path, node = [], last.node
        while node >= 0:
            path.append(len(states) - nodes + node)
            node = last.asked.parents[node]
        found = states[torch.tensor([*range(len(states) - nodes), *path[::-1]])]
        new = decided - self.heard
        if len(found) < new:  # some are missing between, and the network begins anew
            self.states.clear()
        self.states.append(found[-new:])
        self.heard = decided
