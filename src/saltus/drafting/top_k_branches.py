"""Turn logits of several positions into branches: the chain of the best tokens, and beside it other good ones."""

from __future__ import annotations

import math

import numpy as np
import torch

from saltus.core.coupling import PARALLEL_ERROR, draft_tokens
from saltus.core.distributions import TargetDistributions
from saltus.core.sampling import float_row, most_likely
from saltus.core.tree import Branch

MIN_PATH_PROBABILITY = 0.01  # nodes that are reached with a smaller probability are not offered


def largest(row: np.ndarray, count: int) -> np.ndarray:
    """The indices of the largest values, of equal ones the first. For a few this is faster than sorting."""
    left, found = row.copy(), []
    for _ in range(min(count, len(row))):
        found.append(int(left.argmax()))
        left[found[-1]] = -math.inf
    return np.array(found)


def top_k_branches(
    logits: torch.Tensor, choices: int, source: str, token_ids: torch.Tensor | None = None
) -> list[Branch]:
    """The most likely token of every row as a chain, and beside it, at each depth, the next likely tokens.

    `token_ids` are the ids of the columns. Rows do not depend on each other's tokens (a PTP query depends on the
    uniforms of the tokens before its own), so after another choice the chain continues unchanged. NaN logits give no
    branches.
    """
    ids = None if token_ids is None else token_ids.cpu().numpy()
    tokens, probabilities = [], []
    for row in map(float_row, logits):  # in NumPy: torch would wake threads, which spin beside the kernels' own
        likely = largest(row, choices)
        top = row[likely[0]]
        weight = np.exp(row - top).sum(dtype=np.float64)
        probabilities.append((np.exp(row[likely] - top) / weight).tolist())
        tokens.append((likely if ids is None else ids[likely]).tolist())
    if not all(map(math.isfinite, (chance for row in probabilities for chance in row))):
        return []
    return _branches(tokens, probabilities, source)


def coupled_branches(distributions: TargetDistributions, choices: int, source: str) -> list[Branch]:
    """The same for the tokens that the text's own Gumbel noise favours: the greatest log Q(t) + G(t) of each query.

    `distributions` are those of a call with query nodes only.
    """
    tokens, probabilities = [], []
    for query in range(len(distributions.outputs.logits) - 1):
        if math.isnan(most_likely(distributions.outputs.logits[query + 1])[1]):
            return []
        where = distributions.noise, "text", distributions.position(query)
        found = draft_tokens(distributions[query], *where, choices, PARALLEL_ERROR)
        tokens.append([token for token, _ in found])
        probabilities.append([chance for _, chance in found])
    return _branches(tokens, probabilities, source)


def _branches(tokens: list[list[int]], probabilities: list[list[float]], source: str) -> list[Branch]:
    """The chain of the first choices; and at each depth the other choices, after which the chain continues."""
    best, likely = [row[0] for row in tokens], [row[0] for row in probabilities]
    branches, reached = [Branch(best, likely, source)], 1.0
    for depth, (others, chances) in enumerate(zip(tokens, probabilities, strict=True)):
        for token, chance in zip(others[1:], chances[1:], strict=True):
            if reached * chance < MIN_PATH_PROBABILITY:
                break
            changed = [*best[:depth], token, *best[depth + 1 :]], [*likely[:depth], chance, *likely[depth + 1 :]]
            branches.append(Branch(*changed, source))
        reached *= likely[depth]
    return branches
