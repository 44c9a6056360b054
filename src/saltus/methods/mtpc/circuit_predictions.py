"""Predict the next tokens by a circuit along many paths: each node of a draft tree is given the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

from saltus.methods.mtpc.circuits import CircuitFilter

TINY = 1e-30  # in place of a probability of 0, which has no logarithm


@dataclass(frozen=True, eq=False)
class StateDistributions:
    """The likely tokens of one position, ascending, and their log-probabilities in each state of the circuit."""

    tokens: Int[np.ndarray, "likely"]
    log_probabilities: Float[np.ndarray, "rank likely"]

    @cached_property
    def probabilities(self) -> Float[np.ndarray, "rank likely"]:
        return np.exp(self.log_probabilities)

    def evidence(self, token: int) -> Float[np.ndarray, "rank"]:
        """The token's log-probability in each state; 0 for a token that is not among them, which is no evidence."""
        column = int(np.searchsorted(self.tokens, token))
        if column == len(self.tokens) or int(self.tokens[column]) != token:
            return np.zeros(len(self.log_probabilities), dtype=np.float32)
        return self.log_probabilities[:, column]


@dataclass(eq=False)
class CircuitPredictions:
    """The window's distributions after any path of draft tokens (MtPC, §3): conditionals of the joint distribution.

    `positions` are those that can be drafted, the window's last ones. `root` is the circuit after what is known of the
    window.
    """

    positions: Sequence[StateDistributions]
    root: CircuitFilter[np.ndarray]
    grow: None = None
    _filters: dict[tuple[int, ...], CircuitFilter[np.ndarray]] = field(default_factory=dict, init=False)

    @property
    def num_positions(self) -> int:
        return len(self.positions)

    def candidates(self, position: int, path: Sequence[int]) -> tuple[np.ndarray, np.ndarray, float]:
        """See DraftPredictions; the last `position` tokens of `path` are draft tokens of this window."""
        by_state = self.positions[position]
        weights = np.exp(self._filter_after(tuple(path[len(path) - position :])).state_log_weights)
        probabilities = weights @ by_state.probabilities
        if not np.isfinite(probabilities).all():
            return by_state.tokens[:0], probabilities[:0], 0.0
        return by_state.tokens, np.log(np.maximum(probabilities, TINY)), max(1.0 - float(probabilities.sum()), 0.0)

    def _filter_after(self, drafts: tuple[int, ...]) -> CircuitFilter[np.ndarray]:
        if not drafts:
            return self.root
        if drafts not in self._filters:
            after = self._filter_after(drafts[:-1]).copy()
            after.observe(self.positions[len(drafts) - 1].evidence(drafts[-1]))
            self._filters[drafts] = after
        return self._filters[drafts]
