"""Measure how far a student's laws are from what the teacher wrote, or from the teacher's own laws."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional


def masked_mean(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"] | None = None) -> Float[Tensor, ""]:
    """Over the tokens that count; 0 where none does."""
    if mask is None:
        return values.mean()
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp_min(1)


def cross_entropy(logits: Float[Tensor, "*shape vocab"], tokens: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """−log P(t_k): with its own uniform given O-PTP's loss (PTP, Eq. 10), without it C-PTP's (Eq. 11)."""
    flat = functional.cross_entropy(logits.flatten(0, -2), tokens.flatten(), reduction="none")
    return flat.unflatten(0, tokens.shape)


def binary_cross_entropy(
    logits: Float[Tensor, "*shape vocab"], tokens: Int[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """−log P(t_k) − Σ_{l ≠ t_k} log(1 − P(l)) (PTP, Table 4).

    On the softmax's own probabilities, so that its minimum is the law itself and Pick can be used on it.
    """
    logs = logits.log_softmax(-1)
    others = torch.log1p(-logs.exp().clamp_max(1 - 2.0**-20))
    conditioning = tokens[..., None]
    return others.gather(-1, conditioning)[..., 0] - others.sum(-1) - logs.gather(-1, conditioning)[..., 0]


def kl_divergence(
    teacher_logits: Float[Tensor, "*shape vocab"], student_logits: Float[Tensor, "*shape vocab"]
) -> Float[Tensor, "*shape"]:
    """KL(Q ‖ P) of the teacher's law Q and the student's P, from logits (PTP, Eq. 12)."""
    target, logs = teacher_logits.log_softmax(-1), student_logits.log_softmax(-1)
    return (target.exp() * (target - logs)).sum(-1)


def reverse_kl_divergence(
    teacher_logits: Float[Tensor, "*shape vocab"], student_logits: Float[Tensor, "*shape vocab"]
) -> Float[Tensor, "*shape"]:
    """KL(P ‖ Q): what the student would write, judged by the teacher (PTP, Eq. 12)."""
    return kl_divergence(student_logits, teacher_logits)
