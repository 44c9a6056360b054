"""Compare samples with an enumerated law, and take few of them where the two agree: a chi-squared test in three looks.

After some 30 and 60 % of the samples the test may end: where the law is kept it mostly does, since p-values are
uniform then. Where it is not, small p-values go on to the last look, whose limit is that of a test without looks.
"""

from collections.abc import Callable

import numpy as np
from scipy import stats

ALPHA = 1e-4  # false alarms of a whole test, at most
LOOKS = ((0.3, 0.4), (0.6, 0.1))  # shares of the samples, and p-values above which the law counts as kept
CERTAIN = 1e-8  # p-values below which it counts as broken at any look, small cells or not
SMALLEST_CELL = 5  # samples, at the last look


def keeps_law(sample: Callable[[int], int | None], law: np.ndarray, count: int) -> bool:
    """True if the outcomes sample(0), …, sample(count − 1) follow `law`; None is no outcome."""
    labels, found, done = cells(law, count), np.zeros(len(law)), 0
    chances = np.bincount(labels, law)
    for share, enough in (*LOOKS, (1.0, ALPHA)):
        for seed in range(done, round(share * count)):
            outcome = sample(seed)
            if outcome is not None:
                assert law[outcome] > 0, f"seed {seed} gives {outcome}, which the law excludes"
                found[outcome] += 1
        done = round(share * count)
        p_value = goodness_of_fit(np.bincount(labels, found), chances)
        if p_value > enough:
            return True
        if p_value < CERTAIN:
            return False
    return False


def goodness_of_fit(found: np.ndarray, chances: np.ndarray) -> float:
    """p-value of counts (Pearson)."""
    due = chances * found.sum() / chances.sum()
    return float(stats.chi2.sf(((found - due) ** 2 / due).sum(), len(due) - 1))


def cells(law: np.ndarray, count: int) -> np.ndarray:
    """The cell of each outcome: its own, but rare outcomes share one until enough samples are due in it."""
    labels, cell, mass = np.full(len(law), -1), -1, float(SMALLEST_CELL)
    for outcome in np.argsort(law, kind="stable"):
        if mass >= SMALLEST_CELL:
            cell, mass = cell + 1, 0.0
        labels[outcome] = cell
        mass += law[outcome] * count
    if mass < SMALLEST_CELL and cell:  # what is left joins the cell before it
        labels[labels == cell] = cell - 1
    assert law.max() < law.sum(), "all samples agree with a law of one outcome"
    if not labels.any():  # all but one are rare
        labels[law.argmax()] = 1
    return labels


def chance_of_a_miss(distance: float, count: int, num_cells: int) -> float:
    """At most the chance that a law is taken for kept which is Σ (q − p)² / p = distance away."""
    freedom = num_cells - 1
    ends = [(share, stats.chi2.isf(enough, freedom)) for share, enough in (*LOOKS, (1.0, ALPHA))]
    return float(sum(stats.ncx2.cdf(limit, freedom, share * count * distance) for share, limit in ends))
