"""Turn the predictions of one draft call into branches: the likeliest paths, each token given those before it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Float, Int

from saltus.core.coupling import PARALLEL_ERROR, draft_tokens
from saltus.core.noise import Noise
from saltus.core.sampling import Sampling, token_distribution
from saltus.core.tree import Branch
from saltus.drafting.token_correction import TokenCorrection

MIN_PATH_PROBABILITY = 0.01  # nodes that are reached with a smaller probability are not offered
MAX_NODES = 12  # nodes of the branches, at most
MAX_GAP = 8.0  # a token whose logit is further below the largest one is no candidate
MAX_CANDIDATES = 64  # of a position


@dataclass(frozen=True, eq=False)
class DrafterTraits:
    """Properties of a drafter network that its drafts depend on."""

    correction: TokenCorrection | None = None
    informed: bool = True  # False: without uniforms its logits are those of distributions at temperature 1


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

    def candidates(self, position: int, path: Sequence[int]) -> tuple[np.ndarray, np.ndarray, float]:
        """The likely tokens of a position after the tokens of `path`: ids, logits, and the weight Σ exp of all others.

        `path` ends with the token before the position, and holds at least the two tokens before it where they exist.
        Empty for logits that are not finite.
        """
        ids, logits, right, rest = self._position_candidates(position)
        if self.correction is not None and len(ids) and path:
            second_left = path[-2] if len(path) > 1 else None
            sharpness, vector = self.correction.vector(self.position_inputs[position], path[-1], second_left)
            logits = logits * sharpness + right @ vector
            if not np.isfinite(logits).all():
                return ids[:0], logits[:0], 0.0
        return ids, logits, rest

    def _position_candidates(self, position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        """Ids, logits and correction rows of the candidates, and the summed weight of all other tokens.

        Logits are relative to the largest one.
        """
        if position not in self._candidates:
            row = self.logits[position] - self.logits[position].max()
            chosen = np.flatnonzero(row > -MAX_GAP)
            if len(chosen) > MAX_CANDIDATES:
                chosen = np.sort(chosen[np.argpartition(row[chosen], -MAX_CANDIDATES)[-MAX_CANDIDATES:]])
            rest = float(np.exp(row).sum(dtype=np.float64) - np.exp(row[chosen]).sum(dtype=np.float64))
            right = self.correction.right[chosen] if self.correction is not None else row
            ids = chosen if self.token_ids is None else self.token_ids[chosen]
            self._candidates[position] = ids, row[chosen], right, max(rest, 0.0)
        return self._candidates[position]


Chooser = Callable[[PositionPredictions, int, Sequence[int]], list[tuple[int, float]]]
"""Tokens to offer at a position (0: the first one) after a path, with their acceptance probabilities, best first."""


def likeliest(choices: int, temperature: float = 1.0) -> Chooser:
    """The `choices` likeliest tokens, with their probabilities at this temperature."""

    def choose(predictions: PositionPredictions, position: int, path: Sequence[int]) -> list[tuple[int, float]]:
        ids, logits, rest = predictions.candidates(position, path)
        if not len(ids):
            return []
        found = largest(logits, choices)
        top = logits[found[0]]
        weights = np.exp((logits - top) / temperature)
        total = float(weights.sum(dtype=np.float64)) + rest * math.exp(-min(max(float(top), -80.0), 80.0))
        return list(zip(ids[found].tolist(), (weights[found] / total).tolist(), strict=True))

    return choose


def coupled(choices: int, sampling: Sampling, noise: Noise, positions: np.ndarray) -> Chooser:
    """The `choices` tokens that the text's own random numbers favour at each of `positions`.

    Penalties and bans, which need the whole text, are left out.
    """
    truncation = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p", "coupling")}
    sampling = Sampling(**truncation)

    def choose(predictions: PositionPredictions, position: int, path: Sequence[int]) -> list[tuple[int, float]]:
        ids, logits, _ = predictions.candidates(position, path)
        if not len(ids):
            return []
        found = token_distribution(torch.from_numpy(logits), sampling)
        found = replace(found, tokens=ids if found.tokens is None else ids[found.tokens])
        return draft_tokens(found, noise, "text", positions[position], choices, PARALLEL_ERROR)

    return choose


def likely_paths(predictions: PositionPredictions, text: Sequence[int], choose: Chooser, source: str) -> list[Branch]:
    """Branches of the likeliest paths, grown best first.

    `text` holds the last two decided tokens, or fewer in a shorter text.
    """
    root = tuple(text[-2:])
    queue: list[tuple[float, tuple[int, ...], tuple[float, ...]]] = [(-1.0, (), ())]
    leaves: dict[tuple[int, ...], tuple[float, ...]] = {}
    for number in range(MAX_NODES + 1):
        if not queue:
            break
        reached, path, chances = heapq.heappop(queue)
        if path:
            leaves.pop(path[:-1], None)
            leaves[path] = chances
        if number < MAX_NODES and len(path) < len(predictions.logits):
            for token, chance in choose(predictions, len(path), root + path):
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
