"""Loss of a drafter that predicts in one call what its teacher writes token by token (PTP, Alg. 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from saltus.training.data.window_packing import UniformConditioning
from saltus.training.tasks import losses

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
        return (losses.kl_divergence if loss == "kl" else losses.reverse_kl_divergence)(teacher_logits, logits)
    return (losses.cross_entropy if loss == "ce" else losses.binary_cross_entropy)(logits, tokens)
