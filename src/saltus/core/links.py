"""What two tokens say of the one behind them, where its law was asked for before they were known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float


@dataclass(frozen=True, eq=False)
class Links:
    """How the logits of a hole change by the tokens to its left: by scores of neighbours, of low rank.

    To the logit of b, times a sharpness, comes `right[b] · (w * (left[a] + before[z]))`, of b behind a behind z.
    The weights w and the sharpness are of the hole: 1 + its state (the network's last, which says the law) times
    `told`. Laws of several holes that were asked for at once do not know each other's tokens; with the links a draft
    goes from each to the next, as a chain with pairwise potentials does.
    """

    left: Float[np.ndarray, "vocab rank"]
    before: Float[np.ndarray, "vocab rank"]
    right: Float[np.ndarray, "vocab rank"]
    told: Float[np.ndarray, "hidden weights"]  # a weight for each of the rank, and the sharpness

    def weights(self, states: Float[np.ndarray, "holes hidden"]) -> Float[np.ndarray, "holes weights"]:
        """Of holes, by their states; the last column is the sharpness."""
        return 1 + states @ self.told

    def __call__(
        self, logits: Float[np.ndarray, "vocab"], weights: Float[np.ndarray, "weights"], left: int, before: int | None
    ) -> Float[np.ndarray, "vocab"]:
        """Logits behind `left`, and behind `before` if the law did not know the token two to the left either."""
        said = self.left[left] if before is None else self.left[left] + self.before[before]
        return logits * weights[-1] + self.right @ (said * weights[:-1])
