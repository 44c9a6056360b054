"""The map of pairs: PTP combines words that fit, independent prediction cannot."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))

import pair_map


@pytest.mark.slow
def test_ptp_pairs_words_that_fit_and_independent_prediction_does_not(tmp_path):
    found = pair_map.maps(steps=150, size=24)
    wrong = {name: float(1 - pair_map.compatible(pairs).double().mean()) for name, pairs in found.items()}
    itself, ptp, independent = wrong.values()
    assert itself == 0
    assert ptp < 0.15
    assert independent > 0.5
    pair_map.paint(found, 24, tmp_path / "pairs.png")
    assert (tmp_path / "pairs.png").stat().st_size > 10_000
