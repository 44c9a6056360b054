"""Draft several dependent tokens in one pass, conditioned on the uniforms that will pick them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_args

from torch import Tensor

from saltus.core.canvas import Canvas
from saltus.core.forward import ForwardInputs
from saltus.core.noise import Noise
from saltus.core.picking import Coupling
from saltus.core.protocols import Drafter, DraftGenerator
from saltus.core.rules import Rule, match, reject
from saltus.core.sampling import Sampling
from saltus.core.value_types import require_at_least
from saltus.methods.ptp.fused_drafter import FusedPtpDrafter
from saltus.methods.shared.draft_tree import (
    MAX_NODES,
    GrowthRule,
    Likeliest,
    SharedNoise,
    likely_paths,
    position_predictions,
)
from saltus.methods.shared.hidden_state_drafter import HiddenStateDrafter
from saltus.methods.shared.query_chains import (
    SOURCE,
    UniformConditioning,
    position_uniforms,
    query_uniforms,
    two_call_drafter,
    usable_form,
    with_query_chains,
)

log = logging.getLogger("saltus")


@dataclass(frozen=True)
class Ptp:
    """Parallel token prediction (PTP, Draxler et al. 2025): tokens that depend on each other, from one pass.

    The draft model comes from `saltus train ptp`: a small drafter that reads the target's hidden states, in a call of
    its own; a gated adapter of the target, inside the verification call; or such an adapter on a smaller model, a
    student, which reads the text itself. A drafter also offers the next likely tokens of each position.
    """

    model: str = "auto"  # of `saltus train ptp`, or a published drafter's folder or hub id; auto: the shipped one
    num_draft_tokens: int = 8  # of a path, at most; never more than the model was trained for
    top_k: int = 3  # tokens offered for each position, at most
    max_nodes: int = MAX_NODES  # of a drafter's tree; more than --max-draft-tokens are never verified
    growth: GrowthRule = "nodes"  # of a drafter's tree: by single nodes (DDTree), or by all children of one (JetSpec)
    drafts: int = 1  # chains of an adapter under `reject`, of which the most central one is verified (PTP, Eq. 18)
    two_calls: bool = False  # draft in a call of its own (PTP, Alg. 1), not inside the verification call
    argmax: bool = False  # an adapter without its token's uniform drafts its likeliest token, not the pick (Eq. 7)

    def __post_init__(self) -> None:
        require_at_least(self, "ptp: ", num_draft_tokens=1, top_k=1, max_nodes=1, drafts=1)
        if self.growth not in get_args(GrowthRule):
            raise ValueError(f"ptp: growth is {self.growth!r}, but must be {' or '.join(get_args(GrowthRule))}")

    @property
    def draft_models(self) -> dict[str, str]:
        return {"ptp": f"drafter:{self.model}"}

    def for_trained_model(self, kind: str, training: Mapping[str, Any]) -> DrafterPtp | AdapterPtp:
        """The method for the model in its folder: an adapter is decoded with the queries that it was trained for."""
        coupling = training.get("coupling", "probability")
        if kind != "adapter":
            reads_uniforms = training.get("recipe", {}).get("drafter", {}).get("reads_uniforms", False)
            return DrafterPtp(self, coupling, reads_uniforms)
        form, window = training.get("form", "one-hot"), training.get("window", self.num_draft_tokens + 1)
        return AdapterPtp(
            self.model, self.num_draft_tokens, self.two_calls, form, window, "student_of" in training, coupling,
            self.drafts, self.argmax,
        )  # fmt: skip

    def drafter(self, noise: Noise, sampling: Sampling, rule: Rule) -> Drafter:
        return DrafterPtp(self).drafter(noise, sampling, rule)


@dataclass(frozen=True)
class DrafterPtp:
    """`Ptp` with a drafter."""

    options: Ptp
    trained_coupling: Coupling = "probability"  # under others queries have no uniforms
    reads_uniforms: bool = False

    @property
    def draft_models(self) -> dict[str, str]:
        return self.options.draft_models

    def drafter(self, noise: Noise, sampling: Sampling, rule: Rule) -> Drafter:
        if self.options.drafts > 1:
            name = self.options.model
            raise ValueError(f"ptp: several drafts need an adapter, but {name} is a drafter; leave drafts out")
        return HiddenStateDrafter(self.options.num_draft_tokens, self._draft_calls(noise, sampling, rule))

    def _draft_calls(
        self, noise: Noise, sampling: Sampling, rule: Rule
    ) -> Callable[[Canvas, Tensor, int], DraftGenerator]:
        form, choices = usable_form("one-hot", self.trained_coupling, sampling), self.options.top_k
        if self.reads_uniforms:
            _warn_if_other(form, "one-hot", self.options.model, self.trained_coupling, sampling.coupling)

        def draft(canvas: Canvas, hidden_states: Tensor, num_draft_tokens: int) -> DraftGenerator:
            # Under `reject` drafts have uniforms of their own, never those that the rule uses.
            stream = f"{SOURCE}/{canvas.num_decided}" if rule is reject else "text"
            uniforms = position_uniforms(noise, sampling, canvas.open_positions[:num_draft_tokens], stream)
            inputs = ForwardInputs(canvas, network_name="ptp", hidden_states=hidden_states)
            inputs = with_query_chains(inputs, [(-1, query_uniforms(uniforms, form))], sampling.temperature)
            outputs = yield inputs
            predictions = position_predictions(outputs)
            if rule is match and not sampling.greedy and not sampling.has_uniforms:
                choose = SharedNoise(choices, sampling, noise, canvas.open_positions)
            else:
                of_this_temperature = predictions.reads_uniforms or sampling.greedy
                choose = Likeliest(choices, 1.0 if of_this_temperature else sampling.temperature)
            text = canvas.decided_prefix[-2:].tolist()
            return likely_paths(predictions, text, choose, SOURCE, self.options.max_nodes, self.options.growth)

        return draft


@dataclass(frozen=True)
class AdapterPtp:
    """`Ptp` with a gated adapter, of the target or of a student."""

    model: str
    num_draft_tokens: int
    two_calls: bool
    form: Any  # a UniformConditioning: loading refuses adapters of other methods
    window: int  # queries of a chain in training
    is_student: bool
    coupling: Coupling
    drafts: int = 1
    argmax: bool = False

    @property
    def draft_models(self) -> dict[str, str]:
        return {"ptp": self.model if self.is_student else f"adapter:{self.model}"}

    def drafter(self, noise: Noise, sampling: Sampling, rule: Rule) -> Drafter:
        form = usable_form(self.form, self.coupling, sampling)
        _warn_if_other(form, self.form, self.model, self.coupling, sampling.coupling)
        if self.is_student:
            num_draft_tokens = min(self.num_draft_tokens, self.window)
            return two_call_drafter(
                noise, sampling, rule, form, num_draft_tokens, self.drafts, "ptp", argmax=self.argmax
            )
        # the first query predicts the verifier's own token
        num_draft_tokens = min(self.num_draft_tokens, self.window - 1)
        if self.two_calls or rule is reject or self.drafts > 1:
            return two_call_drafter(noise, sampling, rule, form, num_draft_tokens, self.drafts, argmax=self.argmax)
        return FusedPtpDrafter(noise, sampling, form, num_draft_tokens, self.argmax)


@lru_cache  # a line for each, however many texts there are
def _warn_if_other(
    form: UniformConditioning, trained: UniformConditioning, model: str, trained_for: Coupling, coupling: Coupling
) -> None:
    """Log that queries have other uniforms than in training, so that fewer drafts are right."""
    if form != trained:
        log.warning(
            "%s was trained to read the uniforms of the coupling %s, but gets none under %s, so that fewer drafts are"
            " right; decode with --coupling %s (coupling=%r), which has other texts", model, trained_for, coupling,
            trained_for, trained_for,
        )  # fmt: skip
