"""Draft with a smaller model, token by token (classic speculative decoding)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from saltus.core.canvas import Canvas
from saltus.core.distributions import Step
from saltus.core.forward import ForwardInputs
from saltus.core.noise import Noise
from saltus.core.protocols import Drafter, DraftResult
from saltus.core.rules import Rule
from saltus.core.sampling import Sampling
from saltus.methods.shared.autoregressive import draft_autoregressively


@dataclass(frozen=True)
class SmallModel:
    """Speculative decoding (Leviathan et al. 2023) with another model as the draft model.

    Under `match` the draft model picks with the text's own uniforms, so its tokens are the target's wherever their
    distributions agree; under `reject` it samples from its own distribution, which the rule gets. Under `match` it may
    have another vocabulary than the target (Timor et al. 2025).
    """

    any_vocabulary: ClassVar[bool] = True

    model: str = ""  # the draft model: a name or a folder
    num_draft_tokens: int = 5  # at most
    min_probability: float = 0.2  # stop where the product of the drafts' probabilities falls below this

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 1:
            raise ValueError(f"small_model: num_draft_tokens is {self.num_draft_tokens}, but must be 1 or more")
        if not 0 <= self.min_probability < 1:
            raise ValueError(f"small_model: min_probability is {self.min_probability}, but must lie in [0, 1)")

    @property
    def draft_models(self) -> dict[str, str]:
        return {"small_model": self.model}

    def drafter(self, noise: Noise, sampling: Sampling, rule: Rule) -> Drafter:
        def draft(canvas: Canvas, last: Step | None, max_depth: int) -> DraftResult:
            inputs = ForwardInputs(canvas, network_name="small_model")
            limits = min(self.num_draft_tokens, max_depth), self.min_probability
            return draft_autoregressively(inputs, *limits, noise, sampling, rule, "small_model")

        return draft
