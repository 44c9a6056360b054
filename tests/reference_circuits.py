"""Inference in circuits by messages over all latents at once: the reference for `CircuitFilter`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saltus.methods.mtpc.circuits import IMPOSSIBLE_EVIDENCE, Circuit, CircuitFilter


def scopes(circuit: Circuit) -> tuple[frozenset[int], ...]:
    """The positions below each latent."""
    below = [
        {place for place, holder in enumerate(circuit.position_latents) if holder == latent}
        for latent in range(circuit.num_latents)
    ]
    for latent in reversed(range(1, circuit.num_latents)):
        below[circuit.parents[latent]] |= below[latent]
    return tuple(map(frozenset, below))


def levels(circuit: Circuit) -> tuple[tuple[int, ...], ...]:
    """The latents but the first, by their depth: as many stages as a law needs, one after the other."""
    depths = [0] * circuit.num_latents
    for latent, parent in enumerate(circuit.parents[1:], start=1):
        depths[latent] = depths[parent] + 1
    return tuple(
        tuple(latent for latent in range(circuit.num_latents) if depths[latent] == depth)
        for depth in range(1, max(depths) + 1)
    )


def log_probability(
    circuit: Circuit, initial: Float[Tensor, "*batch rank"], transitions: Float[Tensor, "*batch steps rank rank"],
    leaves: Float[Tensor, "*batch window rank"],
) -> Float[Tensor, "*batch"]:  # fmt: skip
    """Of the evidence; what is not known is summed out."""
    return (initial + _upward_messages(circuit, transitions, leaves)[0][..., 0, :]).logsumexp(-1)


def state_posteriors(
    circuit: Circuit, initial: Float[Tensor, "*batch rank"], transitions: Float[Tensor, "*batch steps rank rank"],
    leaves: Float[Tensor, "*batch window rank"],
) -> Float[Tensor, "*batch window rank"]:  # fmt: skip
    """The law of each position's state, given the evidence.

    With the position's own leaf 0, the law of its token is the mixture of its states' laws with these weights.
    Errors: ValueError for evidence of probability 0.
    """
    own, messages, here = (found.unbind(-2) for found in _upward_messages(circuit, transitions, leaves))
    before = [initial] * circuit.num_latents  # log P(state, evidence that is not below the latent)
    for latent in range(1, circuit.num_latents):
        parent = circuit.parents[latent]
        outside = before[parent] + here[parent]
        for sibling in circuit.children[parent]:
            if sibling != latent:
                outside = outside + messages[sibling]
        before[latent] = (outside[..., :, None] + transitions[..., latent - 1, :, :]).logsumexp(-2)
    joint = torch.stack([before[holder] + own[holder] for holder in circuit.position_latents], -2)
    total = joint.logsumexp(-1, keepdim=True)
    if bool((total == -torch.inf).any()):
        raise ValueError(IMPOSSIBLE_EVIDENCE)
    return joint - total


def sample_states(
    circuit: Circuit, initial: Float[Tensor, "*batch rank"], transitions: Float[Tensor, "*batch steps rank rank"],
    leaves: Float[Tensor, "*batch window rank"], uniforms: Float[Tensor, "*batch latents"],
) -> Int[Tensor, "*batch window"]:  # fmt: skip
    """A state for each position, drawn top-down given the evidence (MtPC, Alg. 1); a uniform for each latent.

    One stage a level; tokens are then drawn from the chosen states' laws alone. Errors: ValueError for evidence of
    probability 0.
    """
    own = _upward_messages(circuit, transitions, leaves)[0]
    root = _sample_states(initial + own[..., 0, :], uniforms[..., 0])
    chosen = root[..., None].repeat_interleave(circuit.num_latents, -1)
    for ids, parents in _latents_by_level(circuit, leaves.device):
        rows = _rows_of_states(transitions.index_select(-3, ids - 1), chosen.index_select(-1, parents))
        drawn = _sample_states(rows + own.index_select(-2, ids), uniforms.index_select(-1, ids))
        chosen = chosen.index_copy(-1, ids, drawn)
    return chosen[..., list(circuit.position_latents)]


def most_probable_states(
    circuit: Circuit, initial: Float[Tensor, "*batch rank"], transitions: Float[Tensor, "*batch steps rank rank"],
    leaves: Float[Tensor, "*batch window rank"],
) -> tuple[Int[Tensor, "*batch window"], Float[Tensor, "*batch"]]:  # fmt: skip
    """The most probable states of all latents together, for each position its own, and their log-probability.

    With the leaf of an unknown token the largest of its state's law, tokens are chosen too: the likeliest path.
    Errors: ValueError where every path has probability 0.
    """
    own = list(_evidence_by_latent(circuit, leaves).unbind(-2))
    arrows: list[Tensor] = [initial] * circuit.num_latents
    for latent in reversed(range(1, circuit.num_latents)):
        values, arrows[latent] = (transitions[..., latent - 1, :, :] + own[latent][..., None, :]).max(-1)
        own[circuit.parents[latent]] = own[circuit.parents[latent]] + values
    value, root = (initial + own[0]).max(-1)
    if bool((value == -torch.inf).any()):
        raise ValueError(IMPOSSIBLE_EVIDENCE)
    chosen = [root]
    for latent in range(1, circuit.num_latents):
        chosen.append(arrows[latent].gather(-1, chosen[circuit.parents[latent]][..., None])[..., 0])
    return torch.stack([chosen[holder] for holder in circuit.position_latents], -1), value


def _evidence_by_latent(
    circuit: Circuit, leaves: Float[Tensor, "*batch window rank"]
) -> Float[Tensor, "*batch latents rank"]:
    """The evidence at each latent itself: the sum of its positions' leaves."""
    found = leaves.new_zeros(*leaves.shape[:-2], circuit.num_latents, circuit.rank)
    return found.index_add(-2, torch.tensor(circuit.position_latents, device=leaves.device), leaves)


def _latents_by_level(
    circuit: Circuit, device: torch.device
) -> Iterator[tuple[Int[Tensor, "level"], Int[Tensor, "level"]]]:
    """The latents of each level, and their parents."""
    for level in levels(circuit):
        parents = [circuit.parents[latent] for latent in level]
        yield torch.tensor(level, device=device), torch.tensor(parents, device=device)


def _upward_messages(
    circuit: Circuit, transitions: Float[Tensor, "*batch steps rank rank"], leaves: Float[Tensor, "*batch window rank"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each latent: log P(evidence below it | its state); the same, | its parent's state; and its leaves' sum.

    Each is [*batch, latents, rank]; one stage a level.
    """
    here = _evidence_by_latent(circuit, leaves)
    here = here.expand(*torch.broadcast_shapes(here.shape[:-2], transitions.shape[:-3]), -1, -1)
    own = messages = here
    for ids, parents in reversed(list(_latents_by_level(circuit, leaves.device))):
        said = (transitions.index_select(-3, ids - 1) + own.index_select(-2, ids)[..., None, :]).logsumexp(-1)
        messages = messages.index_copy(-2, ids, said)
        own = own.index_add(-2, parents, said)
    return own, messages, here


def _rows_of_states(
    tables: Float[Tensor, "*batch rank rank"], chosen: Int[Tensor, "*batch"]
) -> Float[Tensor, "*batch rank"]:
    """The row of each table that its parent's state names."""
    return tables.gather(-2, chosen[..., None, None].expand(*chosen.shape, 1, tables.shape[-1]))[..., 0, :]


def _sample_states(
    log_weights: Float[Tensor, "*batch rank"], uniforms: Float[Tensor, "*batch"]
) -> Int[Tensor, "*batch"]:
    """The first state whose running sum exceeds u; states of probability 0 are never drawn."""
    if bool((log_weights.amax(-1) == -torch.inf).any()):
        raise ValueError(IMPOSSIBLE_EVIDENCE)
    sums = log_weights.double().softmax(-1).cumsum(-1)
    sums = sums / sums[..., -1:]
    return (sums <= uniforms[..., None].double().clamp(0, 1 - 2.0**-53)).sum(-1)


def token_losses(
    circuit: Circuit, initial: Float[Tensor, "*batch rank"], transitions: Float[Tensor, "*batch steps rank rank"],
    leaves: Float[Tensor, "*batch window rank"],
) -> Float[Tensor, "*batch window"]:  # fmt: skip
    """−log q(token | tokens before it) of each position; the sum is −log q of the window (MtPC, Eq. 4)."""
    circuit_filter, losses = CircuitFilter(circuit, initial, transitions), []
    for leaf in leaves.unbind(-2):
        losses.append(-(circuit_filter.state_log_weights + leaf).logsumexp(-1))
        circuit_filter.observe(leaf)
    return torch.stack(losses, -1)
