"""Teach a student to say at once what a teacher writes token by token (PTP, Alg. 2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from saltus.training import losses
from saltus.training.edges import Edges, Order, Skipped, picks, place
from saltus.training.windows import Form, Packed, followed, given, inside, pack

Loss = Literal["ce", "bce", "kl", "reverse-kl"]
Network = Callable[[Packed], Tensor]  # the laws of all queries: [batch, windows, window, vocab]


@dataclass(frozen=True)
class Objective:
    """What a student is taught: its form, the loss, and where in its interval a uniform is placed (App. D)."""

    form: Form = "one-hot"
    loss: Loss = "ce"
    window: int = 16
    b: float = 1.0

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window is {self.window}, but a window holds at least one token")
        if self.form == "one-hot" and self.loss in ("kl", "reverse-kl"):
            raise ValueError(f"{self.loss} compares laws, but a one-hot student has none; take ce or bce")


def distil(
    network: Network,
    texts: Int[Tensor, "batch length"],
    edges: Edges,
    splits: Int[Tensor, "batch windows"],
    objective: Objective,
    generator: np.random.Generator,
    skipped: Skipped,
    laws: Float[Tensor, "batch length vocab"] | None = None,
) -> Float[Tensor, ""]:
    """The loss of a batch, the mean over all tokens of the windows that count.

    `edges` [batch, length] and `laws` (logits; for kl and reverse-kl alone) are the teacher's for the token at each
    position, after the sampling settings that the student will draft for.
    """
    window = objective.window
    tokens = inside(texts, splits, window)
    own = Edges(inside(edges.low, splits, window), inside(edges.high, splits, window))
    uniforms, holds = place(own, generator, objective.b)
    skipped.add(holds, tokens, own)
    logits = network(pack(texts, splits, given(uniforms, objective.form)))
    targets = None if laws is None else inside(laws, splits, window)
    return losses.mean(compare(logits, tokens, targets, objective.loss), followed(holds))


def compare(logits: Tensor, tokens: Tensor, laws: Tensor | None, loss: Loss) -> Tensor:
    """The loss of every query, in their shape."""
    if loss in ("kl", "reverse-kl"):
        if laws is None:
            raise ValueError(f"{loss} compares the student's laws with the teacher's; pass laws, or take ce")
        return (losses.divergence if loss == "kl" else losses.reverse_divergence)(laws, logits)
    return (losses.cross_entropy if loss == "ce" else losses.binary_cross_entropy)(logits, tokens)


@torch.no_grad()
def draft(
    network: Network,
    context: Int[Tensor, "batch context"],
    uniforms: Float[Tensor, "batch window"],
    form: Form,
    order: Order = "pick",
) -> Int[Tensor, "batch window"]:
    """What a student says after a context: the argmax (Eq. 5), or the picks of the uniforms from its laws (Eq. 7)."""
    splits = torch.full((len(context), 1), context.shape[1], device=context.device)
    logits = network(pack(context, splits, given(uniforms[:, None], form)))[:, 0]
    return logits.argmax(-1) if form == "one-hot" else picks(uniforms, logits, order=order)


def correct(drafts: Int[Tensor, "batch window"], texts: Int[Tensor, "batch window"]) -> Int[Tensor, "batch"]:
    """The leading tokens that are the teacher's (PTP, Eq. 16)."""
    return (drafts == texts).to(torch.int64).cumprod(-1).sum(-1)
