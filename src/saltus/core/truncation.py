"""Keep the likely tokens of a row of scores: top-k, top-p and min-p, with the numerics of Transformers."""

from __future__ import annotations

import math

import numpy as np
import torch


def top_k(scores: np.ndarray, k: int) -> np.ndarray:
    """TopKLogitsWarper: keep scores not below the k-th best, ties included. Maxima of 64 columns bound it."""
    k = min(k, len(scores))
    maxima = scores[: len(scores) // 64 * 64].reshape(64, -1).max(0)
    kept = np.flatnonzero(scores >= np.partition(maxima, -k)[-k]) if k <= len(maxima) else np.arange(len(scores))
    candidates = scores[kept]
    return kept[candidates >= np.partition(candidates, -k)[-k]]


def top_p(scores: np.ndarray, top_p: float, top: np.float32, vocab: int) -> np.ndarray:
    """TopPLogitsWarper: drop the least likely tokens while their mass is at most 1 − top_p, lower ids first.

    Tokens less likely than (1 − top_p) / vocab are dropped without sorting. If the cut is closer than float32's
    rounding of the mass, the sum is computed as in Transformers, so that the same number of tokens is kept.
    """
    limit = np.float32(1 - top_p)
    gaps = scores - top
    weights = np.exp(gaps)
    total = weights.sum(dtype=np.float64)
    ordered = np.sort(scores[gaps >= math.log(limit * total / vocab) - 0.01])
    likely = np.exp(ordered - top)
    tail = max(total - likely.sum(dtype=np.float64), 0.0)
    running = tail + np.cumsum(likely, dtype=np.float64)
    dropped = int(np.searchsorted(running, limit * total, side="right"))
    slack = rounding_of_mass(limit, total, (len(scores) - len(ordered)) * tail + running.sum())
    if np.abs(running[max(dropped - 1, 0) : dropped + 1] - limit * total).min() <= slack:
        ordered = np.full(vocab, -np.inf, dtype=np.float32)
        ordered[vocab - len(scores) :] = np.sort(scores)
        masses = torch.softmax(torch.from_numpy(ordered), -1).cumsum(-1).numpy()
        dropped = int(np.searchsorted(masses, limit, side="right"))
    dropped = min(dropped, len(ordered) - 1)
    return _greatest(scores, ordered[dropped], len(ordered) - dropped)


def rounding_of_mass(limit: np.float32, total: float, partial_sums: float) -> float:
    """How far a mass that is summed in float32, as Transformers does, may be from `limit` times the total.

    `partial_sums` is the sum of the partial sums of all tokens; four lanes share them.
    """
    return float(limit * (2.0**-24 * partial_sums / 4 + 2.0**-18 * total) + 2.0**-44 * total)


def _greatest(scores: np.ndarray, border: np.float32, count: int) -> np.ndarray:
    """Indices of the `count` greatest scores, the least of which is `border`; among its equals, the last ones."""
    kept = np.flatnonzero(scores >= border)
    equals = np.flatnonzero(scores[kept] == border)
    return np.delete(kept, equals[: len(kept) - count])


def gaps_above_min_p(scores: np.ndarray, min_p: float, top: np.float32) -> np.ndarray | None:
    """How far scores are above that of a token as likely as min_p times the best; None if a cut is close."""
    above = scores - top - np.float32(math.log(min_p))
    return above if min_p > 1e-30 and np.abs(above).min() > 2.0**-18 else None


def min_p(scores: np.ndarray, min_p: float, top: np.float32, vocab: int, tokens: np.ndarray | None) -> np.ndarray:
    """MinPLogitsWarper: drop tokens less likely than min_p times the best; close cuts use Transformers' arithmetic."""
    if (above := gaps_above_min_p(scores, min_p, top)) is not None:
        return np.flatnonzero(above > 0)
    row = np.full(vocab, -np.inf, dtype=np.float32)
    row[slice(None) if tokens is None else tokens] = scores
    masses = torch.softmax(torch.from_numpy(row), -1).numpy()
    return np.flatnonzero((masses if tokens is None else masses[tokens]) >= np.float32(min_p) * masses.max())
