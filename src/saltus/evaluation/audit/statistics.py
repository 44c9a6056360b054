"""Exact tests and intervals for answers of two sides: is a difference more than noise?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
from jaxtyping import Float, Shaped

Differences = Shaped[np.ndarray, "replies replies"]
"""1 where two replies of a group differ, else 0; the first half of the replies are one side's. Symmetric."""


def exchangeability_test(groups: Sequence[Differences]) -> float:
    """The p-value of "in each group the two sides' replies are exchangeable", which noise leaves true.

    Two statistics are summed over groups: how much more replies differ across the sides than within them, and how much
    more one side's replies differ from the rest than the other's. Each has its exact distribution under all
    relabellings of each group's replies (Fisher's permutation test); the smaller p-value counts twice (Bonferroni).
    """
    across = _permutation_p_value([_across_less_within(group) for group in groups], lambda total: total)
    odd = _permutation_p_value([_odd_side(group) for group in groups], abs)
    return min(1.0, 2 * min(across, odd))


def _permutation_p_value(tables: Sequence[np.ndarray], size: Callable[[int], int]) -> float:
    """The share of relabellings whose summed statistic is as large as observed; entry 0 of a table is observed."""
    observed = size(sum(int(table[0]) for table in tables))
    law: dict[int, float] = {0: 1.0}
    for table in tables:
        values, counts = np.unique(table, return_counts=True)
        if len(values) == 1:  # this group says nothing
            law = {total + int(values[0]): share for total, share in law.items()}
            continue
        grown: dict[int, float] = {}
        for total, share in law.items():
            for value, count in zip(values.tolist(), counts.tolist(), strict=True):
                grown[total + value] = grown.get(total + value, 0.0) + share * count / len(table)
        law = grown
    return min(1.0, sum(share for total, share in law.items() if size(total) >= observed))


@lru_cache
def _labellings(replies: int) -> np.ndarray:
    """All choices of half of the replies as the first side, as ±1.0; the observed one first."""
    chosen = np.array(list(combinations(range(replies), replies // 2)))
    rows = np.full((len(chosen), replies), -1.0)  # products of integers have no fast library
    np.put_along_axis(rows, chosen, 1.0, axis=1)
    return rows


def _across_less_within(group: Differences) -> np.ndarray:
    signs = _labellings(len(group))
    return ((signs @ group.astype(float)) * signs).sum(axis=1) / -2  # across minus within, by pairs


def _odd_side(group: Differences) -> np.ndarray:
    return _labellings(len(group)) @ group.astype(float).sum(axis=1)


def mcnemar(only_first: int, only_second: int) -> float:
    """The exact two-sided p-value of McNemar's test, of pairs in which one side alone succeeds."""
    count, least = only_first + only_second, min(only_first, only_second)
    if not count:
        return 1.0
    return min(1.0, 2 * sum(math.comb(count, k) for k in range(least + 1)) / 2**count)


@dataclass(frozen=True)
class PairedDifference:
    """The difference of two success rates on the same tasks, with a 95 % interval."""

    difference: float
    low: float
    high: float


def paired_difference(only_first: int, only_second: int, pairs: int) -> PairedDifference:
    """The second side's rate minus the first one's, with the interval of Bonett and Price (2012)."""
    a, b, total = (only_first + 1) / (pairs + 2), (only_second + 1) / (pairs + 2), pairs + 2
    spread = 1.96 * math.sqrt(max(a + b - (a - b) ** 2, 0.0) / total)
    middle = b - a
    return PairedDifference((only_second - only_first) / pairs, max(-1.0, middle - spread), min(1.0, middle + spread))


def rate_interval(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % interval of a rate (Wilson 1927)."""
    if not trials:
        return 0.0, 1.0
    z, rate = 1.96, successes / trials
    middle = (rate + z * z / (2 * trials)) / (1 + z * z / trials)
    spread = z / (1 + z * z / trials) * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    low = 0.0 if successes == 0 else max(0.0, middle - spread)
    return low, 1.0 if successes == trials else min(1.0, middle + spread)


def holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Which hypotheses are rejected, with a chance of `level` or less of any wrong rejection (Holm 1979)."""
    rejected = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > level / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def energy_test(
    distances: Float[np.ndarray, "groups replies replies"], orders: Shaped[np.ndarray, "draws groups replies"]
) -> float:
    """The p-value of "in each group both halves of the replies have one distribution", by energy distance.

    `orders` are drawn orders of each group's replies, whose first half is the first side (Székely and Rizzo 2004).
    """
    signs = np.ones(distances.shape[1])
    signs[len(signs) // 2 :] = -1
    observed, values = 0.0, np.zeros(len(orders))
    for group, order in zip(distances, orders.swapaxes(0, 1), strict=True):
        drawn = np.empty(order.shape)
        np.put_along_axis(drawn, order, np.broadcast_to(signs, drawn.shape), axis=1)
        observed -= signs @ group @ signs
        values -= ((drawn @ group) * drawn).sum(axis=1)
    return float((1 + np.sum(values >= observed - 1e-9)) / (1 + len(orders)))
