"""Turn the predictions of one draft call into branches: the likeliest paths, each token given those before it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int

from saltus.core.tree import Branch
from saltus.drafting.token_correction import TokenCorrection

MIN_PATH_PROBABILITY = 0.01  # nodes that are reached with a smaller probability are not offered
MAX_NODES = 24  # nodes of the branches, at most
MAX_GAP = 8.0  # a token whose logit is further below the largest one is not corrected


@dataclass(eq=False)
class PositionPredictions:
    """The distributions that one draft call predicts for the next positions.

    With a correction the distribution of a position depends on the two tokens before it. It is then exact for the
    candidates of the position; other tokens, which are unlikely, keep their uncorrected logits.
    """

    logits: Float[np.ndarray, "positions vocab"]
    token_ids: Int[np.ndarray, "vocab"] | None = None  # the ids of the columns; None: 0, 1, …
    correction: TokenCorrection | None = None
    position_inputs: Sequence[np.ndarray] | np.ndarray = ()  # of the correction
    _candidates: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, float]] = field(default_factory=dict, init=False)

    def likely_tokens(self, position: int, path: Sequence[int], count: int) -> list[tuple[int, float]]:
        """The `count` likeliest tokens of a position after the tokens of `path`, with their probabilities.

        `path` ends with the token before the position, and holds at least the two tokens before it where they exist.
        Empty for logits that are not finite.
        """
        ids, logits, right, rest = self._position_candidates(position)
        if not len(ids):
            return []
        if self.correction is not None:
            second_left = path[-2] if len(path) > 1 else None
            sharpness, vector = self.correction.vector(self.position_inputs[position], path[-1], second_left)
            logits = logits * sharpness + right @ vector
        found = largest(logits, count)
        top = logits[found[0]]
        weight = np.exp(logits - top).sum(dtype=np.float64) + rest * math.exp(-min(max(top, -80.0), 80.0))
        chances = np.exp(logits[found] - top) / weight
        return list(zip(ids[found].tolist(), chances.tolist(), strict=True)) if math.isfinite(weight) else []

    def _position_candidates(self, position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        """Ids, logits and correction rows of the candidates, and the summed weight of all other tokens.

        Logits are relative to the largest one.
        """
        if position not in self._candidates:
            row = self.logits[position] - self.logits[position].max()
            chosen = np.flatnonzero(row > -MAX_GAP)
            rest = float(np.exp(row).sum(dtype=np.float64) - np.exp(row[chosen]).sum(dtype=np.float64))
            right = self.correction.right[chosen] if self.correction is not None else row
            ids = chosen if self.token_ids is None else self.token_ids[chosen]
            self._candidates[position] = ids, row[chosen], right, max(rest, 0.0)
        return self._candidates[position]


def likely_paths(predictions: PositionPredictions, text: Sequence[int], choices: int, source: str) -> list[Branch]:
    """Branches of the likeliest paths, grown best first; `choices` tokens are offered after each node, at most.

    `text` holds the last two decided tokens, or fewer in a shorter text.
    """
    root = tuple(text[-2:])
    queue: list[tuple[float, tuple[int, ...], tuple[float, ...]]] = [(-1.0, (), ())]
    leaves: dict[tuple[int, ...], tuple[float, ...]] = {}
    for _ in range(MAX_NODES):
        if not queue:
            break
        reached, path, chances = heapq.heappop(queue)
        if path:
            leaves.pop(path[:-1], None)
            leaves[path] = chances
        if len(path) < len(predictions.logits):
            for token, chance in predictions.likely_tokens(len(path), root + path, choices):
                if -reached * chance >= MIN_PATH_PROBABILITY:
                    heapq.heappush(queue, (reached * chance, (*path, token), (*chances, chance)))
    return [Branch(path, chances, source) for path, chances in leaves.items()]


def largest(row: np.ndarray, count: int) -> np.ndarray:
    """The indices of the largest values, of equal ones the first. For a few this is faster than sorting."""
    left, found = row.copy(), []
    for _ in range(min(count, len(row))):
        found.append(int(left.argmax()))
        left[found[-1]] = -math.inf
    return np.array(found)
