"""Keep what the target said of a text, for a network that reads its states and has not been shown them yet."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from saltus.core.forward import Step


@dataclass
class Listener:
    """The states before the last decided tokens, as many as have been given out without a gap."""

    states: list[torch.Tensor] = field(default_factory=list)
    heard: int = 0  # decided tokens before which a state was given out

    def hear(self, step: Step, decided: int) -> None:
        """The states before the tokens that are decided now: of what the call read, then of the accepted path."""
        states, nodes = step.reply.features, len(step.asked.tokens)
        assert states is not None
        path, node = [], step.node
        while node >= 0:
            path.append(len(states) - nodes + node)
            node = step.asked.parents[node]
        found = states[torch.tensor([*range(len(states) - nodes), *path[::-1]])]
        new = decided - self.heard
        if len(found) < new:  # some are missing between, and the network begins anew
            self.states.clear()
        self.states.append(found[-new:])
        self.heard = decided

    def all(self) -> torch.Tensor:
        """Those that were not shown yet, [slots, states]: the last ones before the decided text's last tokens."""
        return torch.cat(self.states)

    def shown(self) -> None:
        """The network has read them."""
        self.states.clear()
