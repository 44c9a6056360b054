"""Draft token by token with one linear layer on the target's last hidden state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from saltus.core.canvas import Canvas
from saltus.core.forward import ForwardInputs
from saltus.core.noise import Noise
from saltus.core.protocols import Drafter, DraftGenerator, Network
from saltus.core.rules import Rule
from saltus.core.sampling import Sampling
from saltus.methods.shared.autoregressive import draft_autoregressively
from saltus.methods.shared.hidden_state_drafter import HiddenStateDrafter


@dataclass(frozen=True)
class LinearHead:
    """A chain of drafts by a linear layer, which was trained for the target."""

    model: str = ""  # a folder that the training wrote
    num_draft_tokens: int = 4  # at most
    min_probability: float = 0.1  # stop where the product of the drafts' probabilities falls below this

    @property
    def draft_models(self) -> dict[str, str]:
        return {"linear_head": self.model}

    def load_network(self, target: Any, target_name: str) -> Network:
        """What `draft_models` names, for this target. Errors: ValueError."""
        from .network import LinearHeadNetwork, load

        return LinearHeadNetwork(load(Path(self.model), target.model, target_name))

    def drafter(self, noise: Noise, sampling: Sampling, rule: Rule) -> Drafter:
        def draft(canvas: Canvas, hidden_states: Tensor, num_draft_tokens: int) -> DraftGenerator:
            inputs = ForwardInputs(canvas, network_name="linear_head", hidden_states=hidden_states)
            limits = num_draft_tokens, self.min_probability
            return (yield from draft_autoregressively(inputs, *limits, noise, sampling, rule, "linear_head"))

        return HiddenStateDrafter(self.num_draft_tokens, draft)
