"""Teach a student to say at once what a teacher writes token by token (PTP, Alg. 2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from saltus.training.data.uniform_intervals import (
    SkippedTokens,
    TokenOrder,
    UniformIntervals,
    pick_tokens,
    sample_uniforms,
)
from saltus.training.data.window_packing import (
    PackedBatch,
    UniformConditioning,
    gather_windows,
    pack_windows,
    query_uniforms,
    valid_prefix,
)
from saltus.training.tasks import losses

Loss = Literal["ce", "bce", "kl", "reverse-kl"]
QueryNetwork = Callable[[PackedBatch], Tensor]  # the laws of all queries: [batch, windows, window, vocab]


@dataclass(frozen=True)
class Objective:
    """What a student is taught: its form, the loss, and where in its interval a uniform is placed (App. D)."""

    form: UniformConditioning = "one-hot"
    loss: Loss = "ce"
    window: int = 16
    beta: float = 1.0

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window is {self.window}, but a window holds at least one token")
        if self.form == "one-hot" and self.loss in ("kl", "reverse-kl"):
            raise ValueError(f"{self.loss} compares laws, but a one-hot student has none; take ce or bce")


def distillation_loss(
    network: QueryNetwork,
    texts: Int[Tensor, "batch length"],
    intervals: UniformIntervals,
    window_starts: Int[Tensor, "batch windows"],
    objective: Objective,
    generator: np.random.Generator,
    skipped: SkippedTokens,
    distributions: Float[Tensor, "batch length vocab"] | None = None,
) -> Float[Tensor, ""]:
    """The loss of a batch, the mean over all tokens of the windows that count.

    `edges` [batch, length] and `laws` (logits; for kl and reverse-kl alone) are the teacher's for the token at each
    position, after the sampling settings that the student will draft for.
    """
    window = objective.window
    tokens = gather_windows(texts, window_starts, window)
    own = UniformIntervals(
        gather_windows(intervals.low, window_starts, window), gather_windows(intervals.high, window_starts, window)
    )
    uniforms, holds = sample_uniforms(own, generator, objective.beta)
    skipped.record(holds, tokens, own)
    logits = network(pack_windows(texts, window_starts, query_uniforms(uniforms, objective.form)))
    targets = None if distributions is None else gather_windows(distributions, window_starts, window)
    return losses.masked_mean(token_loss(logits, tokens, targets, objective.loss), valid_prefix(holds))


def token_loss(logits: Tensor, tokens: Tensor, distributions: Tensor | None, loss: Loss) -> Tensor:
    """The loss of every query, in their shape."""
    if loss in ("kl", "reverse-kl"):
        if distributions is None:
            raise ValueError(f"{loss} compares the student's laws with the teacher's; pass laws, or take ce")
        return (losses.kl_divergence if loss == "kl" else losses.reverse_kl_divergence)(distributions, logits)
    return (losses.cross_entropy if loss == "ce" else losses.binary_cross_entropy)(logits, tokens)


@torch.no_grad()
def draft_window(
    network: QueryNetwork,
    context: Int[Tensor, "batch context"],
    uniforms: Float[Tensor, "batch window"],
    conditioning: UniformConditioning,
    token_order: TokenOrder = "pick",
) -> Int[Tensor, "batch window"]:
    """What a student says after a context: the argmax (Eq. 5), or the picks of the uniforms from its laws (Eq. 7)."""
    splits = torch.full((len(context), 1), context.shape[1], device=context.device)
    logits = network(pack_windows(context, splits, query_uniforms(uniforms[:, None], conditioning)))[:, 0]
    return logits.argmax(-1) if conditioning == "one-hot" else pick_tokens(uniforms, logits, token_order=token_order)


def num_correct(drafts: Int[Tensor, "batch window"], texts: Int[Tensor, "batch window"]) -> Int[Tensor, "batch"]:
    """The leading tokens that are the teacher's (PTP, Eq. 16)."""
    return (drafts == texts).to(torch.int64).cumprod(-1).sum(-1)
