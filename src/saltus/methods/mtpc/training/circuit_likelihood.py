"""Log-likelihoods of a token under a circuit's states, without keeping whole distributions (MtPC, Eq. 4)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saltus.methods.mtpc.heads import CircuitParameters, HeadModel

LOGITS_PER_CHUNK = 2**18  # few enough to stay in a processor's cache


def token_log_probabilities(
    model: HeadModel, parameters: CircuitParameters, position: int, tokens: Int[Tensor, "windows"]
) -> Float[Tensor, "windows rank"]:
    """log p(token | state) at a position of the window, for each state. Tokens are indices in the draft vocabulary.

    Where states differ only in a subspace, the backward pass recomputes their logits in chunks: those of 64 states,
    320 windows of 8 positions and 8,192 tokens would take 5 GB.
    """
    directions = model.direction_logits()
    if parameters.state_codes is None or directions is None:
        log_probabilities = model.log_probabilities(parameters, position)
        return log_probabilities.gather(-1, _per_state(tokens, log_probabilities))[..., 0]
    return _TokenLogProbabilities.apply(
        model.shared_logits(parameters.position_features[..., position, :]),
        parameters.state_codes[..., position, :, :],
        directions,
        tokens,
    )  # pyright: ignore[reportReturnType]


class _TokenLogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: Tensor, coefficients: Tensor, directions: Tensor, tokens: Tensor) -> Tensor:
        log_probabilities, totals = shared.new_empty(coefficients.shape[:2]), shared.new_empty(coefficients.shape[:2])
        for rows in _chunks(coefficients, directions):
            logits = HeadModel.state_logits(shared[rows], coefficients[rows], directions)
            totals[rows] = logits.logsumexp(-1)
            log_probabilities[rows] = logits.gather(-1, _per_state(tokens[rows], logits))[..., 0] - totals[rows]
        ctx.save_for_backward(shared, coefficients, directions, tokens, totals)
        return log_probabilities

    @staticmethod
    def backward(ctx: Any, *outs: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        shared, codes, directions, tokens, totals = ctx.saved_tensors
        d_shared, d_codes, d_directions = (
            torch.empty_like(shared), torch.empty_like(codes), torch.zeros_like(directions)
        )  # fmt: skip
        for rows in _chunks(codes, directions):
            d_out = outs[0][rows][..., None]
            logits = HeadModel.state_logits(shared[rows], codes[rows], directions)
            d_logits = logits.sub_(totals[rows][..., None]).exp_().mul_(-d_out)
            d_logits.scatter_add_(-1, _per_state(tokens[rows], d_logits), d_out)
            d_shared[rows] = d_logits.sum(1)
            d_codes[rows] = (d_logits @ directions.T).to(codes.dtype)
            d_directions += codes[rows].flatten(0, 1).to(directions.dtype).T @ d_logits.flatten(0, 1)
        return d_shared, d_codes, d_directions, None


def _chunks(
    coefficients: Float[Tensor, "windows rank directions"], directions: Float[Tensor, "directions draft"]
) -> Iterator[slice]:
    count = max(1, LOGITS_PER_CHUNK // (coefficients.shape[1] * directions.shape[1]))
    return (slice(start, start + count) for start in range(0, len(coefficients), count))


def _per_state(
    tokens: Int[Tensor, "windows"], logits: Float[Tensor, "windows rank draft"]
) -> Int[Tensor, "windows rank 1"]:
    """Each window's token, repeated for every state."""
    return tokens[:, None, None].expand(-1, logits.shape[1], 1)
