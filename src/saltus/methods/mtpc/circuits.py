"""Joint distributions of a window of tokens as probabilistic circuits: mixtures with a tree of latents (MtPC, §3).

A circuit here is a structure without parameters: latents with `rank` states each, which form a tree, and the window's
positions, each below one latent. The distribution of the first latent's state is `initial`; that of every other
latent's state is the row of its transition table for its parent's state. A position's token depends on the state of its
latent. The joint probability is a sum over all states, computed by messages up the tree. Sums are over states that
exclude each other (smooth), products over disjoint parts of the window (decomposable), and all weights are normalised.

Tensors, all logarithms, with any batch dimensions in front:

    initial      [rank]                     of the first latent
    transitions  [latents − 1, rank, rank]  of the others: from the parent's state (rows) to their own (columns)
    leaves       [window, rank]             evidence: log p(token | state) of known tokens, 0 of unknown ones

`CircuitFilter` also takes NumPy arrays: for a single text the overhead of torch would exceed the computation.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

Array = TypeVar("Array", Tensor, np.ndarray)


@dataclass(frozen=True)
class Circuit:
    """The structure; the functions below make the four of the paper."""

    rank: int
    parents: tuple[int, ...]  # of the latents, parents first; −1 for the first latent
    position_latents: tuple[int, ...]  # the latent above each position

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"a circuit's rank is {self.rank}, but must be 1 or more")
        if not self.position_latents:
            raise ValueError("a circuit's window is 0, but must be 1 or more")
        assert self.parents[0] == -1 and all(
            0 <= parent < latent for latent, parent in enumerate(self.parents) if latent
        )
        assert set(self.position_latents) | set(self.parents[1:]) == set(range(self.num_latents)), (
            "a latent has no children and no positions"
        )
        assert all(len(children) <= 2 for children in self.children)

    @property
    def window(self) -> int:
        """The number of tokens."""
        return len(self.position_latents)

    @property
    def num_latents(self) -> int:
        return len(self.parents)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of each latent."""
        children: list[list[int]] = [[] for _ in self.parents]
        for latent, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(latent)
        return tuple(map(tuple, children))

    @cached_property
    def transitions_between_positions(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """For each position, the (left, entered) latents on the way from the previous position's latent to its own."""
        transitions, here = [], 0
        for latent_above in self.position_latents:
            above, below = self._path_to_root(here), self._path_to_root(latent_above)
            left = tuple(latent for latent in above if latent not in below)
            transitions.append((left, tuple(latent for latent in reversed(below) if latent not in above)))
            here = latent_above
        return tuple(transitions)

    def _path_to_root(self, latent: int) -> list[int]:
        """A latent, its parent, and so on to the first latent."""
        path = [latent]
        while path[-1]:
            path.append(self.parents[path[-1]])
        return path


class CircuitFilter(Generic[Array]):
    """Conditions a circuit on a window's tokens one by one, and gives the state weights of the next position.

    The distribution of the next token is the mixture of its states' distributions with weights `state_log_weights`. So
    a window is drafted token by token, each given the ones before, and the chain rule splits its log-probability. Each
    position costs the steps down the tree, and up again after a finished part, from the previous position.
    """

    def __init__(
        self,
        circuit: Circuit,
        initial: Float[Array, "*batch rank"],
        transitions: Float[Array, "*batch steps rank rank"],
    ) -> None:
        self.circuit, self.transitions = circuit, transitions
        self.position = 0
        self.joint_by_latent = {0: initial}  # log P(state, all evidence), of the latents above the next position
        self.evidence_by_latent = {0: _zeros_like(initial)}  # log P(evidence below the latent | its state)
        self._go_to_next_position()

    def copy(self) -> CircuitFilter[Array]:
        """A filter that goes on from here by itself."""
        other = copy.copy(self)
        other.joint_by_latent, other.evidence_by_latent = dict(self.joint_by_latent), dict(self.evidence_by_latent)
        return other

    @property
    def state_log_weights(self) -> Float[Array, "*batch rank"]:
        """The log-weights of the next position's states. Errors: ValueError for evidence of probability 0."""
        joint = self.joint_by_latent[self.circuit.position_latents[self.position]]
        total = _logsumexp(joint, -1)[..., None]
        if bool((total == -torch.inf).any()):
            raise ValueError(IMPOSSIBLE_EVIDENCE)
        return joint - total

    def observe(self, leaf: Float[Array, "*batch rank"]) -> None:
        """Condition on the next position's token, given its log-probability in each state."""
        latent = self.circuit.position_latents[self.position]
        self.joint_by_latent[latent] = self.joint_by_latent[latent] + leaf
        self.evidence_by_latent[latent] = self.evidence_by_latent[latent] + leaf
        self.position += 1
        if self.position < self.circuit.window:
            self._go_to_next_position()

    def _go_to_next_position(self) -> None:
        left, entered = self.circuit.transitions_between_positions[self.position]
        for latent in left:
            parent, evidence = self.circuit.parents[latent], self.evidence_by_latent.pop(latent)
            del self.joint_by_latent[latent]
            message = _logsumexp(self.transitions[..., latent - 1, :, :] + evidence[..., None, :], -1)
            self.joint_by_latent[parent] = self.joint_by_latent[parent] + message
            self.evidence_by_latent[parent] = self.evidence_by_latent[parent] + message
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


IMPOSSIBLE_EVIDENCE = "the evidence has probability 0 under the circuit; give tokens of its vocabulary"


def independent_circuit(window: int) -> Circuit:
    """Independent tokens (FF)."""
    return mixture_circuit(window, 1)


def mixture_circuit(window: int, rank: int) -> Circuit:
    """One latent for the whole window; tokens are independent given its state (CP)."""
    return Circuit(rank, (-1,), (0,) * window)


def chain_circuit(window: int, rank: int) -> Circuit:
    """A latent for each position, each a child of the one before (a hidden Markov model)."""
    return Circuit(rank, tuple(range(-1, window - 1)), tuple(range(window)))


def tree_circuit(window: int, rank: int) -> Circuit:
    """A latent for the window, then for each half of it, down to pairs (BTree); halves may differ by a token."""
    parents, position_latents = [-1], [0] * window

    def split(low: int, high: int, latent: int) -> None:
        middle = (low + high + 1) // 2
        for begin, end in ((low, middle), (middle, high)):
            if end - begin > 1:
                parents.append(latent)
                split(begin, end, len(parents) - 1)
            elif end > begin:
                position_latents[begin] = latent

    split(0, window, 0)
    return Circuit(rank, tuple(parents), tuple(position_latents))
