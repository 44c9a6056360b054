"""Losses between a student's logits and the teacher's tokens, or the teacher's own distributions."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional


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
