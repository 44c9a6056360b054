"""Draft token by token with multi-token-prediction heads: of the target's own checkpoint, or trained for it."""

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
from saltus.core.value_types import require_at_least
from saltus.methods.shared.autoregressive import draft_autoregressively
from saltus.methods.shared.hidden_state_drafter import HiddenStateDrafter

SOURCE = "mtp"


@dataclass(frozen=True)
class Mtp:
    """Multi-token prediction (MTP, DeepSeek-AI 2024) by the heads of the target's checkpoint, or by a trained one.

    A head reads the embedding of a token and the hidden state before it, through a layer of its own, and predicts the
    next token; for the token after that it reads its own draft and its own output. Beside each draft its next likely
    tokens are offered. Under `match` at a temperature drafts are the tokens that the text's own random numbers favour.
    """

    model: str = ""  # a folder of `saltus train mtp` or speculators; empty: the heads in the target's checkpoint
    num_draft_tokens: int = 4  # of a path, at most; one call of a head each
    top_k: int = 3  # tokens offered after each path, at most
    min_probability: float = 0.1  # stop where the product of the drafts' probabilities falls below this

    def __post_init__(self) -> None:
        require_at_least(self, "mtp: ", num_draft_tokens=1, top_k=1)
        if not 0 <= self.min_probability < 1:
            raise ValueError(f"mtp: min_probability is {self.min_probability}, but must lie in [0, 1)")

    @property
    def draft_models(self) -> dict[str, str]:
        return {"mtp": self.model or "the target's own heads"}

    def load_network(self, target: Any, target_name: str) -> Network:
        """The heads. Errors: ValueError of one line if there are none, not all of them, or those of another target."""
        from saltus.methods.mtp.files import load_heads  # here, so that a drafter imports no network
        from saltus.methods.mtp.network import MtpNetwork

        folder = Path(self.model) if self.model else None
        return MtpNetwork(load_heads(target, target_name, folder), target)

    def drafter(self, noise: Noise, sampling: Sampling, rule: Rule) -> Drafter:
        def draft(canvas: Canvas, hidden_states: Tensor, num_draft_tokens: int) -> DraftGenerator:
            inputs = ForwardInputs(canvas, network_name="mtp", hidden_states=hidden_states)
            limits = num_draft_tokens, self.min_probability
            return draft_autoregressively(inputs, *limits, noise, sampling, rule, SOURCE, top_k=self.top_k)

        return HiddenStateDrafter(self.num_draft_tokens, draft)
