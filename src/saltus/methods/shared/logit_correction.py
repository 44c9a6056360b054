"""Correct logits by the two tokens to the left of their position, which were not known when they were computed.

A call that predicts several positions computes their logits independently. A correction restores most of what they
lack. It is of low rank: it adds `right @ v` to the logits, where v depends on the position and the two tokens. So a few
candidates are corrected without touching the rest of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from saltus.core.sampling import float_row

MAX_TOKEN_VECTORS = 4096  # tokens whose vectors are kept: 8 MB at rank 256


@runtime_checkable
class TokenCorrection(Protocol):
    """Logits become `sharpness * logits + right @ vector`."""

    @property
    def right(self) -> Any:
        """[vocab, rank] in float32: an array, or what gives the rows of numbers of columns, as `TableRows`."""
        ...

    def position_inputs(self, hidden_states: Float[Tensor, "positions hidden"]) -> np.ndarray:
        """[positions, …]: what the correction needs of each position."""
        ...

    def vector(self, position: np.ndarray, left: int, second_left: int | None) -> tuple[float, np.ndarray]:
        """The sharpness and the vector [rank] of one position.

        `second_left` is None where the logits already depend on that token.
        """
        ...


@dataclass(frozen=True, eq=False)
class TableRows:
    """Rows of a large table in the dtype of its file, as float32 by their numbers."""

    table: Float[Tensor, "rows rank"]

    def __getitem__(self, rows: Any) -> np.ndarray:
        numbers = torch.as_tensor(rows, dtype=torch.int64, device=self.table.device)
        return self.table[numbers].float().cpu().numpy()


@dataclass(frozen=True, eq=False)
class PairwiseCorrection:
    """Scores of pairs of tokens: the correction of any-subset models (ASSD).

    The vector is w * (left[a] + second_left[z]), where a is the token to the left of the position and z the one before
    it. The weights w and the sharpness belong to the position: 1 + its hidden state times `gate`. Drafts then form a
    chain with pairwise potentials.
    """

    left: Float[np.ndarray, "vocab rank"]
    second_left: Float[np.ndarray, "vocab rank"]
    right: Float[np.ndarray, "vocab rank"]
    gate: Float[np.ndarray, "hidden weights"]  # a weight for each component of the rank, and the sharpness
    grow: Callable[..., Any] | None = None  # of a `HolePredictions`, a text and a chooser: a faster `grown_nodes`

    @property
    def tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return self.left, self.second_left, self.right, self.gate

    def position_inputs(
        self, hidden_states: Float[Tensor, "positions hidden"]
    ) -> Float[np.ndarray, "positions weights"]:
        """The weights of each position; the last column is the sharpness."""
        return np.stack([1 + row @ self.gate for row in float_row(hidden_states)])

    def vector(self, position: np.ndarray, left: int, second_left: int | None) -> tuple[float, np.ndarray]:
        """The sharpness and the vector [rank] of one position."""
        scores = self.left[left] if second_left is None else self.left[left] + self.second_left[second_left]
        return float(position[-1]), scores * position[:-1]


@dataclass(frozen=True, eq=False)
class NonlinearCorrection:
    """The correction of drafters, `TokenCorrectionModel`: SiLU(A·e(left) + B·e(second left) + G·h) − SiLU(G·h).

    `right` is the unembedding of the drafted tokens times the model's output matrix.
    """

    left: Float[np.ndarray, "rank hidden"]  # A
    second_left: Float[np.ndarray, "rank hidden"]  # B
    project: Callable[[Float[Tensor, "positions hidden"]], Float[Tensor, "positions rank"]]  # by G
    right: Float[np.ndarray, "vocab rank"]
    embed: Callable[[int], Float[np.ndarray, "hidden"]]  # e: of a token id of the target
    token_vectors: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # A·e and B·e

    def position_inputs(self, hidden_states: Float[Tensor, "positions hidden"]) -> Float[np.ndarray, "positions rank"]:
        """G·h of each position."""
        return float_row(self.project(hidden_states))

    def vector(self, position: np.ndarray, left: int, second_left: int | None) -> tuple[float, np.ndarray]:
        """The sharpness, which is 1, and the vector [rank] of one position."""
        total = position + self.token_vectors_of(left)[0]
        if second_left is not None:
            total += self.token_vectors_of(second_left)[1]
        return 1.0, _silu(total) - _silu(position)

    def token_vectors_of(self, token: int) -> tuple[Float[np.ndarray, "rank"], Float[np.ndarray, "rank"]]:
        """A·e and B·e of a token."""
        if token not in self.token_vectors:
            if len(self.token_vectors) >= MAX_TOKEN_VECTORS:
                self.token_vectors.clear()
            embedded = self.embed(token)
            # not by BLAS: its threads would go on spinning beside those of the kernels
            left, second_left = (np.einsum("ri,i->r", x, embedded) for x in (self.left, self.second_left))
            self.token_vectors[token] = left, second_left
        return self.token_vectors[token]


def corrected_logits(
    correction: TokenCorrection,
    logits: Float[np.ndarray, "vocab"],
    position: np.ndarray,
    left: int,
    second_left: int | None,
) -> Float[np.ndarray, "vocab"]:
    """All logits of one position after these two tokens."""
    sharpness, vector = correction.vector(position, left, second_left)
    return logits * sharpness + correction.right @ vector


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))
