"""Truncate a row of logits by its likeliest tokens alone, which a device copies to the host in place of the row."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from saltus.core.picking import Distribution
from saltus.core.sampling import Sampling
from saltus.core.truncation import gaps_above_min_p, rounding_of_mass, top_k, top_p

NUM_CANDIDATES = 128  # of a row
TOTAL_ERROR = 1e-5  # of a sum of weights that a device computed, as a share


class Candidates(NamedTuple):
    """The likeliest tokens of a row of logits, and what is left: enough to truncate it without the whole row."""

    tokens: np.ndarray  # [n] int64, in any order; their logits are not below any other
    logits: np.ndarray  # [n] float32
    total: float  # Σ exp(logit / temperature − the greatest) of the whole row, to TOTAL_ERROR of it
    vocab: int


def truncated_distribution(candidates: Candidates, sampling: Sampling) -> Distribution | None:
    """What `token_distribution` gives for the row of these candidates; None if they cannot tell.

    So it is where the cut is below the least of them, or too close for the rounding of `total`, and for logits that are
    not finite. For sampling that truncates and is `token_independent`.
    """
    order = np.argsort(candidates.tokens)
    tokens, scores = candidates.tokens[order], candidates.logits[order]
    if not np.isfinite(scores.max()):
        return None
    if sampling.temperature != 1:
        scores = scores / np.float32(sampling.temperature)
    top, least, complete = scores.max(), scores.min(), len(scores) == candidates.vocab
    cut = False
    if sampling.top_k:
        kept = top_k(scores, sampling.top_k)
        cut = complete or bool(scores[kept].min() > least)
        if not cut:
            return None
        tokens, scores = tokens[kept], scores[kept]
    if sampling.top_p < 1:
        if cut or complete:
            kept = top_p(scores, sampling.top_p, top, candidates.vocab)
        elif (kept := _nucleus(scores, sampling.top_p, top, candidates.total, candidates.vocab)) is None:
            return None
        tokens, scores, cut = tokens[kept], scores[kept], True
    if sampling.min_p > 0:
        above, least_above = (gaps_above_min_p(each, sampling.min_p, top) for each in (scores, np.array([least])))
        if above is None or least_above is None or not (cut or complete or least_above[0] < 0):
            return None
        tokens, scores = tokens[above > 0], scores[above > 0]
    weights = np.exp((scores - top).astype(np.float64))
    return Distribution(tokens[weights > 0], weights[weights > 0], sampling.coupling)


def _nucleus(scores: np.ndarray, share: float, top: np.float32, total: float, vocab: int) -> np.ndarray | None:
    """The places that `top_p` keeps of a row's greatest scores, given the sum of all weights; None if unknown."""
    limit = np.float32(1 - share)
    order = np.argsort(scores, kind="stable")  # of equals the later ids are kept
    likely = np.exp((scores[order] - top).astype(np.float64))
    tail = max(total - likely.sum(), 0.0)
    running = tail + np.cumsum(likely)
    dropped = int(np.searchsorted(running, limit * total, side="right"))
    close = rounding_of_mass(limit, total, (vocab - len(order)) * tail + running.sum()) + TOTAL_ERROR * total
    if dropped == 0 or dropped == len(order) or np.abs(running - limit * total).min() <= close:
        return None
    if scores[order[dropped]] == scores[order[0]]:  # perhaps equal to scores that are not here
        return None
    return np.sort(order[dropped:])
