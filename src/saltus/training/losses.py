"""Losses of a drafter that predicts in one call what its teacher writes token by token (PTP, Alg. 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from saltus.training.data.window_packing import UniformConditioning

Loss = Literal["ce", "bce", "kl", "reverse-kl"]


@dataclass(frozen=True)
class DistillationSettings:
    """How a query is conditioned, its loss, and where in its interval a uniform is placed (PTP, App. D)."""

    form: UniformConditioning = "one-hot"
    loss: Loss = "ce"
    window: int = 16
    beta: float = 1.0  # b of Beta(b, b)

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window is {self.window}, but a window holds at least one token")
        if self.form == "one-hot" and self.loss in ("kl", "reverse-kl"):
            raise ValueError(f"{self.loss} compares distributions, but a one-hot student has none; take ce or bce")


def token_loss(logits: Tensor, tokens: Tensor, teacher_logits: Tensor | None, loss: Loss) -> Tensor:
    """The loss of every query, in the shape of `tokens`. Errors: ValueError for kl and reverse-kl without a teacher."""
    if loss in ("kl", "reverse-kl"):
        if teacher_logits is None:
            raise ValueError(f"{loss} compares the student with the teacher; pass the teacher's logits, or take ce")
        return (kl_divergence if loss == "kl" else reverse_kl_divergence)(teacher_logits, logits)
    return (cross_entropy if loss == "ce" else binary_cross_entropy)(logits, tokens)


def cross_entropy(logits: Float[Tensor, "*shape vocab"], tokens: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """−log P(t_k): with its own uniform given O-PTP's loss (PTP, Eq. 10), without it C-PTP's (Eq. 11)."""
    flat = functional.cross_entropy(logits.flatten(0, -2), tokens.flatten(), reduction="none")
    return flat.unflatten(0, tokens.shape)


def binary_cross_entropy(
    logits: Float[Tensor, "*shape vocab"], tokens: Int[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """−log P(t_k) − Σ_{l ≠ t_k} log(1 − P(l)) (PTP, Table 4).

    P is the softmax, so the minimum is the teacher's distribution, and Pick can use it.
    """
    logs = logits.log_softmax(-1)
    others = torch.log1p(-logs.exp().clamp_max(1 - 2.0**-20))
    targets = tokens[..., None]
    return others.gather(-1, targets)[..., 0] - others.sum(-1) - logs.gather(-1, targets)[..., 0]


def kl_divergence(
    teacher_logits: Float[Tensor, "*shape vocab"], student_logits: Float[Tensor, "*shape vocab"]
) -> Float[Tensor, "*shape"]:
    """KL(Q ‖ P) of the teacher's distribution Q and the student's P, from logits (PTP, Eq. 12)."""
    target, logs = teacher_logits.log_softmax(-1), student_logits.log_softmax(-1)
    return (target.exp() * (target - logs)).sum(-1)


def reverse_kl_divergence(
    teacher_logits: Float[Tensor, "*shape vocab"], student_logits: Float[Tensor, "*shape vocab"]
) -> Float[Tensor, "*shape"]:
    """KL(P ‖ Q): an expectation under the student's distribution P (PTP, Eq. 12)."""
    return kl_divergence(student_logits, teacher_logits)
