"""Draft several dependent tokens in one pass, conditioned on the uniforms that will pick them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from saltus.core.canvas import Canvas
from saltus.core.forward import ForwardInputs
from saltus.core.noise import Noise
from saltus.core.protocols import Drafter
from saltus.core.rules import Rule, reject
from saltus.core.sampling import Sampling
from saltus.drafting.fused_drafter import FusedPtpDrafter
from saltus.drafting.hidden_state_drafter import DraftCalls, HiddenStateDrafter
from saltus.drafting.ptp_queries import (
    SOURCE,
    UniformConditioning,
    position_uniforms,
    two_call_drafter,
    with_query_chains,
)
from saltus.drafting.top_k_branches import top_k_branches


@dataclass(frozen=True)
class Ptp:
    """Parallel token prediction (PTP, Draxler et al. 2025): tokens that depend on each other, from one pass.

    The draft model comes from `saltus train ptp`: a small drafter that reads the target's hidden states, in a call of
    its own; a gated adapter of the target, inside the verification call; or such an adapter on a smaller model, a
    student, which reads the text itself. A drafter also offers the next likely tokens of each position.
    """

    model: str = "auto"  # a folder written by `saltus train ptp`; auto: the drafter shipped for the target
    length: int = 8  # draft tokens, at most; never more than the model was trained for
    choices: int = 3  # tokens offered for each position, at most
    two_calls: bool = False  # draft in a call of its own (PTP, Alg. 1), not inside the verification call

    def __post_init__(self) -> None:
        for name in ("length", "choices"):
            if getattr(self, name) < 1:
                raise ValueError(f"ptp: {name} is {getattr(self, name)}, but must be 1 or more")

    @property
    def draft_models(self) -> dict[str, str]:
        if self._is_student:
            return {"ptp": self.model}
        return {"ptp": f"{'adapter' if self._is_adapter else 'drafter'}:{self.model}"}

    @property
    def _is_adapter(self) -> bool:
        return Path(self.model, "adapter_config.json").is_file()

    @property
    def _is_student(self) -> bool:
        return self._is_adapter and "student_of" in self._training

    @cached_property
    def _training(self) -> Mapping[str, Any]:
        """How the model was trained, as its papers say: `form`, and the `window` of its queries."""
        papers = Path(self.model, "saltus.json")
        conditioning = json.loads(papers.read_text(encoding="utf-8")) if papers.is_file() else {}
        return conditioning.get("training", {})

    def drafter(self, noise: Noise, sampling: Sampling, rule: Rule) -> Drafter:
        if not self._is_adapter:
            return HiddenStateDrafter(self.length, self._draft_calls(noise, sampling, rule))
        form: UniformConditioning = self._training.get("form", "one-hot")
        window = self._training.get("window", self.length + 1)
        if self._is_student:
            return two_call_drafter(noise, sampling, rule, form, min(self.length, window), network_name="ptp")
        length = min(self.length, window - 1)  # the first query predicts the verifier's own token
        if self.two_calls or rule is reject:
            return two_call_drafter(noise, sampling, rule, form, length)
        return FusedPtpDrafter(noise, sampling, form, length)

    def _draft_calls(self, noise: Noise, sampling: Sampling, rule: Rule) -> Callable[[Canvas, Tensor, int], DraftCalls]:
        def draft(canvas: Canvas, hidden_states: Tensor, length: int) -> DraftCalls:
            # Under `reject` drafts have uniforms of their own, never those that the rule uses.
            stream = f"{SOURCE}/{canvas.num_decided}" if rule is reject else "text"
            uniforms = position_uniforms(noise, sampling, canvas.open_positions[:length], stream)
            inputs = ForwardInputs(canvas, network_name="ptp", hidden_states=hidden_states)
            outputs = yield with_query_chains(inputs, [(-1, uniforms)], sampling.temperature)
            return top_k_branches(outputs.logits[1:], self.choices, SOURCE, outputs.token_ids)

        return draft
