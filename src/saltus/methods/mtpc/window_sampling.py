"""Draw a window of tokens from a circuit in a stage for each level of its latents (MtPC, Alg. 1), in tensors.

Every position has one uniform. It chooses the states of the latents that no earlier position lies below, and then the
token: after each choice, what is left of the uniform within the chosen interval is a uniform again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saltus.methods.mtpc.circuits import Circuit

LEAST = 1e-300  # of a probability, so that logarithms are finite and can be subtracted


@dataclass(frozen=True)
class Level:
    """Latents of one depth; the positions below them are disjoint."""

    latents: Int[Tensor, "level"]
    parents: Int[Tensor, "level"]
    positions: Int[Tensor, "level"]  # whose uniform chooses the latent's state; counted from the first drawn position


@lru_cache(maxsize=64)
def levels_of_window(circuit: Circuit, first: int, length: int, device: torch.device) -> tuple[Level, ...]:
    """The levels of latents above positions first … first + length − 1, the first latent's own level first."""
    owner: dict[int, int] = {}  # the first drawn position below each latent
    for position in range(first, first + length):
        latent = circuit.position_latents[position]
        while latent >= 0 and latent not in owner:
            owner[latent] = position - first
            latent = circuit.parents[latent]
    depths: dict[int, int] = {}
    for latent in sorted(owner):  # parents come first
        depths[latent] = depths[circuit.parents[latent]] + 1 if latent else 0
    levels = []
    for depth in range(max(depths.values()) + 1):
        latents = [latent for latent, latent_depth in depths.items() if latent_depth == depth]
        columns = latents, [circuit.parents[latent] for latent in latents], [owner[latent] for latent in latents]
        levels.append(Level(*(torch.tensor(column, device=device) for column in columns)))
    return tuple(levels)


def draw_window(
    circuit: Circuit,
    initial: Float[Tensor, "rank"],
    transitions: Float[Tensor, "steps rank rank"],
    token_probabilities: Float[Tensor, "length rank likely"],
    known: Sequence[Float[Tensor, "rank"]],
    uniforms: Float[Tensor, "length"],
) -> tuple[Int[Tensor, "length"], Float[Tensor, "length likely"]]:
    """Columns of the drawn tokens, and the distribution of each given the tokens before it.

    `known` is the evidence of the window's first tokens (log p(token | state)), which are decided already; the drawn
    positions follow them. All in float64, so that the distributions are those drawn from up to 1e-12.
    """
    first, length = len(known), len(uniforms)
    levels = levels_of_window(circuit, first, length, uniforms.device)
    above = torch.tensor(circuit.position_latents[first : first + length], device=uniforms.device)
    evidence = initial.new_zeros(circuit.num_latents, circuit.rank)
    for position, leaf in enumerate(known):
        evidence[circuit.position_latents[position]] += leaf
    below, _ = _upward(levels, transitions, evidence) if known else (evidence, evidence)
    states, left = _draw_states(levels, initial, transitions, below, uniforms)
    of_state = token_probabilities[torch.arange(length, device=above.device), states[above]]
    columns, _ = _choose(of_state, left)
    leaves = token_probabilities.gather(-1, columns[:, None, None].expand(-1, circuit.rank, 1))[..., 0]
    weights = _next_state_weights(circuit, levels, initial, transitions, evidence, leaves.clamp_min(LEAST).log(), above)
    return columns, (weights[:, None, :] @ token_probabilities)[:, 0]


def _draw_states(
    levels: Sequence[Level], initial: Tensor, transitions: Tensor, below: Tensor, uniforms: Tensor
) -> tuple[Int[Tensor, "latents"], Float[Tensor, "length"]]:
    """A state for each latent, level by level, and what is left of the uniforms."""
    states = torch.zeros(len(below), dtype=torch.int64, device=below.device)
    left = uniforms.clone()
    for depth, level in enumerate(levels):
        prior = transitions[level.latents - 1, states[level.parents]] if depth else initial[None]
        weights = (prior + below[level.latents]).softmax(-1)
        states[level.latents], left[level.positions] = _choose(weights, left[level.positions])
    return states, left


def _choose(weights: Float[Tensor, "rows n"], uniforms: Float[Tensor, "rows"]) -> tuple[Tensor, Tensor]:
    """The column whose interval of the cumulative weights holds the uniform, and where in that interval it lies."""
    sums = weights.cumsum(-1)
    x = (uniforms * sums[:, -1])[:, None]
    columns = torch.searchsorted(sums, x, right=True).clamp(max=weights.shape[-1] - 1)
    width, high = weights.gather(-1, columns), sums.gather(-1, columns)
    left = ((x - (high - width)) / width.clamp_min(1e-300)).clamp(0, 1 - 2.0**-53)
    return columns[:, 0], left[:, 0]


def _upward(levels: Sequence[Level], transitions: Tensor, evidence: Tensor) -> tuple[Tensor, Tensor]:
    """Of each latent, log P(evidence below it | its state), and the same given its parent's state [*batch, latents,
    rank]; one stage a level."""
    below, messages = evidence.clone(), torch.zeros_like(evidence)
    for level in reversed(levels[1:]):
        message = (transitions[level.latents - 1] + below[..., level.latents, None, :]).logsumexp(-1)
        messages[..., level.latents, :] = message
        below.index_add_(-2, level.parents, message)
    return below, messages


def _next_state_weights(
    circuit: Circuit, levels: Sequence[Level], initial: Tensor, transitions: Tensor,
    evidence: Float[Tensor, "latents rank"], leaves: Float[Tensor, "length rank"], above: Int[Tensor, "length"],
) -> Float[Tensor, "length rank"]:  # fmt: skip
    """The distribution of each drawn position's state, given the evidence and the tokens drawn before it.

    A batch of windows, the i-th with the first i drawn tokens: up the levels and down again.
    """
    length = len(leaves)
    earlier = torch.ones(length, length, dtype=leaves.dtype, device=leaves.device).tril(-1)
    given = evidence.expand(length, -1, -1).clone()
    given.index_add_(1, above, earlier[:, :, None] * leaves)
    below, messages = _upward(levels, transitions, given)
    joint = below.clone()  # log P(state, all evidence)
    joint[:, 0] += initial
    for level in levels[1:]:
        outside = joint[:, level.parents] - messages[:, level.latents]
        prior = (outside[..., :, None] + transitions[level.latents - 1]).logsumexp(-2)
        joint[:, level.latents] = prior + below[:, level.latents]
    return joint[torch.arange(length, device=above.device), above].softmax(-1)
