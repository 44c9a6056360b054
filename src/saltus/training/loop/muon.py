"""Muon (Jordan et al. 2024): orthogonalized momentum for weight matrices; it needs fewer steps than AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

NEWTON_SCHULZ_COEFFICIENTS = 3.4445, -4.7750, 2.0315  # a x + b x³ + c x⁵ maps singular values in (0, 1] to about 1
NEWTON_SCHULZ_STEPS = 5
ADAMW_RMS = 0.2  # root mean square of an entry of AdamW's steps, per unit of the rate (Liu et al. 2025)


class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum, for weights of two dimensions: steps are as large in directions with small gradients.

    The learning rate has AdamW's scale (Liu et al. 2025, §2.2). Our own, since torch.optim.Muon always computes in
    bfloat16, which is slow on processors without it; this one does so only with `use_bfloat16`.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        lr: float,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        use_bfloat16: bool = False,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.use_bfloat16 = use_bfloat16
        if any(weight.dim() != 2 for group in self.param_groups for weight in group["params"]):
            raise ValueError("Muon is for weights of two dimensions; leave the others to AdamW")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step, with Nesterov momentum."""
        assert closure is None
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                average = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                average.lerp_(weight.grad, 1 - momentum)
                nesterov = weight.grad.lerp(average, momentum)
                direction = orthogonalize(nesterov.bfloat16() if self.use_bfloat16 else nesterov).to(weight.dtype)
                weight.mul_(1 - rate * group["weight_decay"])
                weight.add_(direction, alpha=-rate * ADAMW_RMS * math.sqrt(max(weight.shape)))


def orthogonalize(matrix: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    """The nearest matrix with singular values of about 1 (0.7 to 1.2), by Newton-Schulz iteration."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / (x.norm() + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.T
        x = a * x + torch.addmm(square, square, square, beta=b, alpha=c) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T
