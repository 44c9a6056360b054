"""Joint laws of a window of tokens as probabilistic circuits: mixtures whose latent choices form a tree (MtPC, §3).

A circuit here is a structure without parameters: latents, each with `rank` states, that hang from one another, and
the window's positions, each of which hangs from a latent. The first latent's state follows `start`, every other one's
the row of `steps` that its parent's state names, and a position's token the law of its latent's state. So the joint law
is a sum over all states, computed by passing messages up the tree; sums are over states that exclude each other
(smooth), products over parts of the window that do not meet (decomposable), and all weights are normalised.

Tensors, all logarithms, with any batch dimensions in front:

    start   [rank]                   of the first latent
    steps   [latents − 1, rank, rank]  of the others: from the parent's state (rows) to its own (columns)
    leaves  [window, rank]           evidence: log p(token | state) of what is known, 0 of what is not

There is no hidden state: what is not given is not remembered. A `Reader` takes NumPy's arrays as well: of a single text
they are so small that the framework would cost more than the sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

Array = TypeVar("Array", Tensor, np.ndarray)


@dataclass(frozen=True)
class Circuit:
    """The structure; `independent`, `mixture`, `chain` and `tree` make the four of the paper."""

    rank: int
    parents: tuple[int, ...]  # of the latents, in whose order parents come first; -1: the first latent, which has none
    position_latents: tuple[int, ...]  # of the positions: the latent that each hangs from

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"a circuit's rank is {self.rank}, but must be 1 or more")
        if not self.position_latents:
            raise ValueError("a circuit's window is 0, but must be 1 or more")
        assert self.parents[0] == -1 and all(0 <= parent < own for own, parent in enumerate(self.parents) if own)
        assert set(self.position_latents) | set(self.parents[1:]) == set(range(self.num_latents)), (
            "a latent that nothing hangs from"
        )
        assert all(len(children) <= 2 for children in self.children)

    @property
    def window(self) -> int:
        """Tokens that the law is of."""
        return len(self.position_latents)

    @property
    def num_latents(self) -> int:
        return len(self.parents)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Of each latent."""
        found: list[list[int]] = [[] for _ in self.parents]
        for latent, parent in enumerate(self.parents[1:], start=1):
            found[parent].append(latent)
        return tuple(map(tuple, found))

    @cached_property
    def scopes(self) -> tuple[frozenset[int], ...]:
        """The positions below each latent."""
        below = [
            {place for place, holder in enumerate(self.position_latents) if holder == latent}
            for latent in self.latent_ids
        ]
        for latent in reversed(self.latent_ids[1:]):
            below[self.parents[latent]] |= below[latent]
        return tuple(map(frozenset, below))

    @property
    def latent_ids(self) -> range:
        """The latents' numbers."""
        return range(self.num_latents)

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """The latents but the first, by their depth: as many stages as a law needs, one after the other."""
        depths = [0] * self.num_latents
        for latent, parent in enumerate(self.parents[1:], start=1):
            depths[latent] = depths[parent] + 1
        return tuple(
            tuple(latent for latent in self.latent_ids if depths[latent] == depth)
            for depth in range(1, max(depths) + 1)
        )

    @cached_property
    def transitions_between_positions(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """From the holder of each position to that of the next: latents that are left, then those that are entered."""
        found, here = [], 0
        for holder in self.position_latents:
            above, below = self._path_to_root(here), self._path_to_root(holder)
            left = tuple(latent for latent in above if latent not in below)
            found.append((left, tuple(latent for latent in reversed(below) if latent not in above)))
            here = holder
        return tuple(found)

    def _path_to_root(self, latent: int) -> list[int]:
        """A latent, what it hangs from, and so on to the first."""
        found = [latent]
        while found[-1]:
            found.append(self.parents[found[-1]])
        return found

    def log_probability(
        self, initial: Float[Tensor, "*batch rank"], transitions: Float[Tensor, "*batch steps rank rank"],
        leaves: Float[Tensor, "*batch window rank"],
    ) -> Float[Tensor, "*batch"]:  # fmt: skip
        """Of the evidence; what is not known is summed out."""
        return (initial + self._upward_messages(transitions, leaves)[0][..., 0, :]).logsumexp(-1)

    def state_posteriors(
        self, initial: Float[Tensor, "*batch rank"], transitions: Float[Tensor, "*batch steps rank rank"],
        leaves: Float[Tensor, "*batch window rank"],
    ) -> Float[Tensor, "*batch window rank"]:  # fmt: skip
        """The law of each position's state, given the evidence.

        With the position's own leaf 0, the law of its token is the mixture of its states' laws with these weights.
        Errors: ValueError for evidence of probability 0.
        """
        own, messages, here = (found.unbind(-2) for found in self._upward_messages(transitions, leaves))
        before = [initial] * self.num_latents  # log P(state, evidence that is not below the latent)
        for latent in self.latent_ids[1:]:
            parent = self.parents[latent]
            outside = before[parent] + here[parent]
            for sibling in self.children[parent]:
                if sibling != latent:
                    outside = outside + messages[sibling]
            before[latent] = (outside[..., :, None] + transitions[..., latent - 1, :, :]).logsumexp(-2)
        joint = torch.stack([before[holder] + own[holder] for holder in self.position_latents], -2)
        total = joint.logsumexp(-1, keepdim=True)
        if bool((total == -torch.inf).any()):
            raise ValueError(IMPOSSIBLE_EVIDENCE)
        return joint - total

    def sample_states(
        self, initial: Float[Tensor, "*batch rank"], transitions: Float[Tensor, "*batch steps rank rank"],
        leaves: Float[Tensor, "*batch window rank"], uniforms: Float[Tensor, "*batch latents"],
    ) -> Int[Tensor, "*batch window"]:  # fmt: skip
        """A state for each position, drawn top-down given the evidence (MtPC, Alg. 1); a uniform for each latent.

        One stage a level; tokens are then drawn from the chosen states' laws alone. Errors: ValueError for evidence of
        probability 0.
        """
        own = self._upward_messages(transitions, leaves)[0]
        root = _sample_states(initial + own[..., 0, :], uniforms[..., 0])
        chosen = root[..., None].repeat_interleave(self.num_latents, -1)
        for ids, parents in self._latents_by_level(leaves.device):
            rows = _rows_of_states(transitions.index_select(-3, ids - 1), chosen.index_select(-1, parents))
            drawn = _sample_states(rows + own.index_select(-2, ids), uniforms.index_select(-1, ids))
            chosen = chosen.index_copy(-1, ids, drawn)
        return chosen[..., list(self.position_latents)]

    def most_probable_states(
        self, initial: Float[Tensor, "*batch rank"], transitions: Float[Tensor, "*batch steps rank rank"],
        leaves: Float[Tensor, "*batch window rank"],
    ) -> tuple[Int[Tensor, "*batch window"], Float[Tensor, "*batch"]]:  # fmt: skip
        """The most probable states of all latents together, for each position its own, and their log-probability.

        With the leaf of an unknown token the largest of its state's law, tokens are chosen too: the likeliest path.
        Errors: ValueError where every path has probability 0.
        """
        own = list(self._evidence_by_latent(leaves).unbind(-2))
        arrows: list[Tensor] = [initial] * self.num_latents
        for latent in reversed(self.latent_ids[1:]):
            values, arrows[latent] = (transitions[..., latent - 1, :, :] + own[latent][..., None, :]).max(-1)
            own[self.parents[latent]] = own[self.parents[latent]] + values
        value, root = (initial + own[0]).max(-1)
        if bool((value == -torch.inf).any()):
            raise ValueError(IMPOSSIBLE_EVIDENCE)
        chosen = [root]
        for latent in self.latent_ids[1:]:
            chosen.append(arrows[latent].gather(-1, chosen[self.parents[latent]][..., None])[..., 0])
        return torch.stack([chosen[holder] for holder in self.position_latents], -1), value

    def _evidence_by_latent(self, leaves: Float[Tensor, "*batch window rank"]) -> Float[Tensor, "*batch latents rank"]:
        """The evidence at each latent itself: the sum of its positions' leaves."""
        found = leaves.new_zeros(*leaves.shape[:-2], self.num_latents, self.rank)
        return found.index_add(-2, torch.tensor(self.position_latents, device=leaves.device), leaves)

    def _latents_by_level(self, device: torch.device) -> Iterator[tuple[Int[Tensor, "level"], Int[Tensor, "level"]]]:
        """The latents of each level, and their parents."""
        for level in self.levels:
            parents = [self.parents[latent] for latent in level]
            yield torch.tensor(level, device=device), torch.tensor(parents, device=device)

    def _upward_messages(
        self, transitions: Float[Tensor, "*batch steps rank rank"], leaves: Float[Tensor, "*batch window rank"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of each latent: log P(evidence below it | its state); the same, | its parent's state; and its leaves' sum.

        Each is [*batch, latents, rank]; one stage a level.
        """
        here = self._evidence_by_latent(leaves)
        here = here.expand(*torch.broadcast_shapes(here.shape[:-2], transitions.shape[:-3]), -1, -1)
        own = messages = here
        for ids, parents in reversed(list(self._latents_by_level(leaves.device))):
            said = (transitions.index_select(-3, ids - 1) + own.index_select(-2, ids)[..., None, :]).logsumexp(-1)
            messages = messages.index_copy(-2, ids, said)
            own = own.index_add(-2, parents, said)
        return own, messages, here


class CircuitFilter(Generic[Array]):
    """Reads a window's tokens one after the other, and says before each of them what it expects.

    The law of the token to come is the mixture of its position's states with the weights `expected`. So a window is
    drafted token by token, each knowing the ones before; and the chain rule takes a window's log-probability apart.
    Each position costs a step down the tree or, behind a finished part of it, one up again.
    """

    def __init__(
        self,
        circuit: Circuit,
        initial: Float[Array, "*batch rank"],
        transitions: Float[Array, "*batch steps rank rank"],
    ) -> None:
        self.circuit, self.transitions = circuit, transitions
        self.position = 0
        self.joint_by_latent = {0: initial}  # log P(state, all that was read), of the latents above the next position
        self.evidence_by_latent = {0: _zeros_like(initial)}  # log P(what was read below the latent | its state)
        self._go_to_next_position()

    @property
    def state_log_weights(self) -> Float[Array, "*batch rank"]:
        """The log-weights of the next position's states. Errors: ValueError where what was read has probability 0."""
        joint = self.joint_by_latent[self.circuit.position_latents[self.position]]
        total = _logsumexp(joint, -1)[..., None]
        if bool((total == -torch.inf).any()):
            raise ValueError(IMPOSSIBLE_EVIDENCE)
        return joint - total

    def observe(self, leaf: Float[Array, "*batch rank"]) -> None:
        """The next position's token, by its log-probability in each state."""
        holder = self.circuit.position_latents[self.position]
        self.joint_by_latent[holder], self.evidence_by_latent[holder] = (
            self.joint_by_latent[holder] + leaf,
            self.evidence_by_latent[holder] + leaf,
        )
        self.position += 1
        if self.position < self.circuit.window:
            self._go_to_next_position()

    def _go_to_next_position(self) -> None:
        left, entered = self.circuit.transitions_between_positions[self.position]
        for latent in left:
            parent, own = self.circuit.parents[latent], self.evidence_by_latent.pop(latent)
            del self.joint_by_latent[latent]
            said = _logsumexp(self.transitions[..., latent - 1, :, :] + own[..., None, :], -1)
            self.joint_by_latent[parent], self.evidence_by_latent[parent] = (
                self.joint_by_latent[parent] + said,
                self.evidence_by_latent[parent] + said,
            )
        for latent in entered:
            parent = self.circuit.parents[latent]
            self.joint_by_latent[latent] = _logsumexp(
                self.joint_by_latent[parent][..., :, None] + self.transitions[..., latent - 1, :, :], -2
            )
            self.evidence_by_latent[latent] = _zeros_like(self.joint_by_latent[latent])


def _zeros_like(x: Array) -> Array:
    return np.zeros_like(x) if isinstance(x, np.ndarray) else torch.zeros_like(x)


def _logsumexp(x: Array, dim: int) -> Array:
    if not isinstance(x, np.ndarray):
        return x.logsumexp(dim)
    top = x.max(dim, keepdims=True)
    top = np.where(top == -np.inf, 0, top)
    with np.errstate(divide="ignore"):
        return (np.log(np.exp(x - top).sum(dim, keepdims=True)) + top).squeeze(dim)


def token_losses(
    circuit: Circuit, initial: Float[Tensor, "*batch rank"], transitions: Float[Tensor, "*batch steps rank rank"],
    leaves: Float[Tensor, "*batch window rank"],
) -> Float[Tensor, "*batch window"]:  # fmt: skip
    """−log q(token | those before it) of each position; they sum to −log q of the window (MtPC, Eq. 4)."""
    reader, found = CircuitFilter(circuit, initial, transitions), []
    for leaf in leaves.unbind(-2):
        found.append(-(reader.state_log_weights + leaf).logsumexp(-1))
        reader.observe(leaf)
    return torch.stack(found, -1)


IMPOSSIBLE_EVIDENCE = (
    "the evidence has probability 0 under the circuit, so nothing follows from it; give tokens that it knows"
)


def independent_circuit(window: int) -> Circuit:
    """All tokens for themselves (FF)."""
    return mixture_circuit(window, 1)


def mixture_circuit(window: int, rank: int) -> Circuit:
    """One choice for the whole window, the tokens independent given it (CP)."""
    return Circuit(rank, (-1,), (0,) * window)


def chain_circuit(window: int, rank: int) -> Circuit:
    """A choice for each position, each following the one before it (a hidden Markov model)."""
    return Circuit(rank, tuple(range(-1, window - 1)), tuple(range(window)))


def tree_circuit(window: int, rank: int) -> Circuit:
    """A choice for the window, then for each half of it, down to pairs (BTree); halves may differ by a token."""
    parents, holders = [-1], [0] * window

    def split(low: int, high: int, latent: int) -> None:
        middle = (low + high + 1) // 2
        for begin, end in ((low, middle), (middle, high)):
            if end - begin > 1:
                parents.append(latent)
                split(begin, end, len(parents) - 1)
            elif end > begin:
                holders[begin] = latent

    split(0, window, 0)
    return Circuit(rank, tuple(parents), tuple(holders))


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
