"""What an any-subset model predicted for the next holes in earlier calls, corrected by the tokens decided since."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from saltus.core.forward import ForwardOutputs
from saltus.core.sampling import float_row
from saltus.methods.shared.draft_tree import Chooser, GrowPaths, LikelyTokens, PathNode, likely_tokens
from saltus.methods.shared.logit_correction import PairwiseCorrection, corrected_logits

NO_CANDIDATES = LikelyTokens(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32), 0.0)


@dataclass(frozen=True)
class AnySubsetOutputs(ForwardOutputs):
    """The outputs of a call of an any-subset model, with the correction of what it predicts for several holes."""

    correction: PairwiseCorrection | None = None


@dataclass(frozen=True, eq=False)
class HoleLogits:
    """What a call predicted for a hole."""

    outputs: ForwardOutputs  # of that call
    row: int  # of the hole in them
    num_known: int  # new tokens that were decided at that call

    @property
    def logits(self) -> Tensor:
        return self.outputs.logits[self.row]

    @property
    def hidden_states(self) -> Tensor | None:
        """Of the call [rows, hidden]; None if it had no correction that needs them."""
        return None if self.correction is None else self.outputs.hidden_states

    @property
    def correction(self) -> PairwiseCorrection | None:
        return self.outputs.correction if isinstance(self.outputs, AnySubsetOutputs) else None

    @cached_property
    def weights(self) -> np.ndarray | None:
        """Of the pairwise correction, if the call had one."""
        states = self.hidden_states
        if self.correction is None or states is None:
            return None
        return self.correction.position_inputs(states[self.row : self.row + 1])[0]

    def num_unknown(self, order: Int[np.ndarray, "holes"], index: int) -> int:
        """How many of the two tokens to the left of new token `index` were decided since the call."""
        since = min(index - self.num_known, 2)
        return next((back for back in range(since) if order[index - back - 1] != order[index] - back - 1), since)

    def corrected(
        self, correction: PairwiseCorrection | None, unknown: int, path: Sequence[int]
    ) -> Float[np.ndarray, "vocab"]:
        """Logits in float32 after the tokens of `path`, of which the last `unknown` ones were decided since the call.

        A correction that is not finite is left out.
        """
        row = float_row(self.logits)
        if correction is None or self.weights is None or not unknown or not path:
            return row
        second_left = path[-2] if unknown > 1 and len(path) > 1 else None
        corrected_row = corrected_logits(correction, row, self.weights, path[-1], second_left)
        return corrected_row if np.isfinite(corrected_row.max()) else row


@dataclass(eq=False)
class HolePredictions:
    """`DraftPredictions` of the next holes: a distribution for each, which depends on the two tokens to its left.

    The likely tokens of a position are found among all its corrected logits, since the correction changes them much.
    """

    holes: Sequence[HoleLogits]
    unknown: Sequence[int]  # of each hole: see HoleLogits.num_unknown
    correction: PairwiseCorrection | None
    banned: np.ndarray  # tokens that are never drafted
    last_tokens: frozenset[int] = frozenset()  # tokens that end a hole: nothing is drafted after them
    _without_correction: dict[int, LikelyTokens] = field(default_factory=dict, init=False)  # by position

    @property
    def num_positions(self) -> int:
        return len(self.holes)

    @property
    def grow(self) -> GrowPaths | None:
        """See DraftPredictions."""
        return None if self.correction is None or self.correction.grow is None else self._grow

    def _grow(self, text: Sequence[int], choose: Chooser) -> Sequence[PathNode] | None:
        assert self.correction is not None and self.correction.grow is not None
        return self.correction.grow(self, text, choose)

    def candidates(self, position: int, path: Sequence[int]) -> tuple[np.ndarray, np.ndarray, float]:
        """See DraftPredictions; empty for logits that are not finite."""
        likely = NO_CANDIDATES
        if not position or path[-1] not in self.last_tokens:
            likely = self._likely_tokens(position, path)
        return likely.columns, likely.logits, likely.rest

    def _likely_tokens(self, position: int, path: Sequence[int]) -> LikelyTokens:
        if position in self._without_correction:
            return self._without_correction[position]
        row = self.holes[position].corrected(self.correction, self.unknown[position], path)
        if len(self.banned):
            row = row.copy()
            row[self.banned[self.banned < len(row)]] = -np.inf
        likely = likely_tokens(row)
        if self.correction is None:
            self._without_correction[position] = likely
        return likely
