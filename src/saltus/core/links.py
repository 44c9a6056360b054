"""What a token says of the one behind it, where that one was asked about before the token was known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float


@dataclass(frozen=True, eq=False)
class Links:
    """Scores of neighbours, of low rank: `right[b] · left[a]` is added to the logit of b behind a.

    Laws of several holes that were asked for at once do not know each other's tokens. With the links a draft goes from
    each to the next, as a chain with pairwise potentials does.
    """

    left: Float[np.ndarray, "vocab rank"]
    right: Float[np.ndarray, "vocab rank"]

    def __call__(self, token: int) -> Float[np.ndarray, "vocab"]:
        return self.right @ self.left[token]
