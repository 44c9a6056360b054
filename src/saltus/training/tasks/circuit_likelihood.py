"""How likely a circuit's states find a token, without keeping their laws: all that Eq. 4 of MtPC asks of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saltus.networks.draft_models.heads import CircuitParameters, HeadModel

LOGITS_PER_CHUNK = 2**18  # logits that are worked on at a time: they stay in a processor's cache


def token_log_probabilities(
    model: HeadModel, parameters: CircuitParameters, position: int, tokens: Int[Tensor, "windows"]
) -> Float[Tensor, "windows rank"]:
    """log p(token | state) at a position of the window, for each of its states. Tokens are places among those drafted.

    Where states differ in a subspace alone, their logits are made anew in the backward pass, piece by piece: those of
    64 states, 320 windows of 8 positions and 8,192 tokens would take 5 GB.
    """
    reach = model.direction_logits()
    if parameters.state_codes is None or reach is None:
        distributions = model.log_probabilities(parameters, position)
        return distributions.gather(-1, _per_state(tokens, distributions))[..., 0]
    return _TokenLogProbabilities.apply(
        model.shared_logits(parameters.position_features[..., position, :]),
        parameters.state_codes[..., position, :, :],
        reach,
        tokens,
    )  # pyright: ignore[reportReturnType]


class _TokenLogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: Tensor, coefficients: Tensor, directions: Tensor, tokens: Tensor) -> Tensor:
        found, totals = shared.new_empty(coefficients.shape[:2]), shared.new_empty(coefficients.shape[:2])
        for rows in _chunks(coefficients, directions):
            logits = HeadModel.state_logits(shared[rows], coefficients[rows], directions)
            totals[rows] = logits.logsumexp(-1)
            found[rows] = logits.gather(-1, _per_state(tokens[rows], logits))[..., 0] - totals[rows]
        ctx.save_for_backward(shared, coefficients, directions, tokens, totals)
        return found

    @staticmethod
    def backward(ctx: Any, *outs: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        shared, codes, reach, tokens, totals = ctx.saved_tensors
        to_shared, to_codes, to_reach = torch.empty_like(shared), torch.empty_like(codes), torch.zeros_like(reach)
        for rows in _chunks(codes, reach):
            flow = outs[0][rows][..., None]
            logits = HeadModel.state_logits(shared[rows], codes[rows], reach)
            moved = logits.sub_(totals[rows][..., None]).exp_().mul_(-flow)
            moved.scatter_add_(-1, _per_state(tokens[rows], moved), flow)
            to_shared[rows] = moved.sum(1)
            to_codes[rows] = (moved @ reach.T).to(codes.dtype)
            to_reach += codes[rows].flatten(0, 1).to(reach.dtype).T @ moved.flatten(0, 1)
        return to_shared, to_codes, to_reach, None


def _chunks(
    coefficients: Float[Tensor, "windows rank directions"], directions: Float[Tensor, "directions draft"]
) -> Iterator[slice]:
    count = max(1, LOGITS_PER_CHUNK // (coefficients.shape[1] * directions.shape[1]))
    return (slice(start, start + count) for start in range(0, len(coefficients), count))


def _per_state(
    tokens: Int[Tensor, "windows"], logits: Float[Tensor, "windows rank draft"]
) -> Int[Tensor, "windows rank 1"]:
    """Each window's token, for every state."""
    return tokens[:, None, None].expand(-1, logits.shape[1], 1)
