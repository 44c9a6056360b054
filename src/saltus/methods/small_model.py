"""Draft with a smaller model, token by token (classic speculative decoding)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from saltus.core.canvas import Canvas
from saltus.core.distributions import Step
from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.core.noise import Noise
from saltus.core.protocols import Drafter, DraftResult
from saltus.core.rules import Rule
from saltus.core.sampling import Sampling
from saltus.core.tree import Branch
from saltus.core.value_types import require_at_least
from saltus.methods.shared.autoregressive import draft_autoregressively

FIRST_TOKENS = 4  # of a prompt that is too long: models attend to the first tokens of a text whatever they are


@dataclass(frozen=True)
class SmallModel:
    """Speculative decoding (Leviathan et al. 2023) with another model as the draft model.

    Under `match` the draft model picks with the text's own random numbers, so its tokens are the target's wherever
    their distributions agree; under `reject` it samples from its own distribution, which the rule gets. Under `match`
    it may have another vocabulary than the target (Timor et al. 2025).
    """

    any_vocabulary: ClassVar[bool] = True

    model: str = ""  # the draft model: a name or a folder
    num_draft_tokens: int = 5  # at most
    max_prompt: int = 256  # tokens of a longer prompt that the draft model reads: the last ones, and a few first ones
    min_probability: float = 0.2  # stop where the product of the drafts' probabilities falls below this

    def __post_init__(self) -> None:
        require_at_least(self, "small_model: ", num_draft_tokens=1, max_prompt=1)
        if not 0 <= self.min_probability < 1:
            raise ValueError(f"small_model: min_probability is {self.min_probability}, but must lie in [0, 1)")

    @property
    def draft_models(self) -> dict[str, str]:
        return {"small_model": self.model}

    def drafter(self, noise: Noise, sampling: Sampling, rule: Rule) -> Drafter:
        def draft(canvas: Canvas, last: Step | None, max_depth: int) -> DraftResult:
            inputs = ForwardInputs(canvas, network_name="small_model")
            limits = min(self.num_draft_tokens, max_depth), self.min_probability
            drafts = draft_autoregressively(inputs, *limits, noise, sampling, rule, "small_model")
            dropped = range(FIRST_TOKENS, int(canvas.order[0]) - self.max_prompt)
            return _without(dropped, drafts) if dropped else drafts

        return draft


def _without(
    dropped: range, drafts: Generator[ForwardInputs, ForwardOutputs, Sequence[Branch]]
) -> Generator[ForwardInputs, ForwardOutputs, Sequence[Branch]]:
    """Let the draft model read the text without these tokens of the prompt."""
    try:
        inputs = next(drafts)
        while True:
            outputs = yield replace(inputs, canvas=inputs.canvas.without(dropped))
            inputs = drafts.send(outputs)
    except StopIteration as end:
        return end.value
