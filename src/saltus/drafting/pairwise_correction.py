"""Correct the draft logits of a hole by the two tokens to its left (ASSD), with a low-rank table of pairs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float


@dataclass(frozen=True, eq=False)
class PairwiseCorrection:
    """Low-rank pairwise scores that are added to logits which were computed before their left neighbours were known.

    The logit of token b becomes `sharpness * logit + right[b] · (w * (left[a] + second_left[z]))`, where a is the
    token to the left of b and z the one before it. The weights w and the sharpness belong to the hole: 1 + its hidden
    state times `gate`. Logits of several holes from one call do not depend on each other's tokens; with the correction
    drafts form a chain with pairwise potentials.
    """

    left: Float[np.ndarray, "vocab rank"]
    second_left: Float[np.ndarray, "vocab rank"]
    right: Float[np.ndarray, "vocab rank"]
    gate: Float[np.ndarray, "hidden weights"]  # a weight for each component of the rank, and the sharpness

    def weights(self, hidden_states: Float[np.ndarray, "holes hidden"]) -> Float[np.ndarray, "holes weights"]:
        """The weights of each hole; the last column is the sharpness."""
        return 1 + hidden_states @ self.gate

    def __call__(
        self,
        logits: Float[np.ndarray, "vocab"],
        weights: Float[np.ndarray, "weights"],
        left: int,
        second_left: int | None,
    ) -> Float[np.ndarray, "vocab"]:
        """Corrected logits; `second_left` is None where the logits already depend on that token."""
        scores = self.left[left] if second_left is None else self.left[left] + self.second_left[second_left]
        return logits * weights[-1] + self.right @ (scores * weights[:-1])
