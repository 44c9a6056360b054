"""The map of pairs: PTP combines words that fit, independent prediction cannot."""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import torch

import drafters_in_pieces
import pair_map


@pytest.mark.slow
def test_ptp_pairs_words_that_fit_and_independent_prediction_does_not(tmp_path):
    found = pair_map.maps(steps=150, size=24, coupling="probability")
    wrong = {name: float(1 - pair_map.compatible(pairs).double().mean()) for name, pairs in found.items()}
    itself, ptp, independent = wrong.values()
    assert itself == 0
    assert ptp < 0.15
    assert independent > 0.5
    pair_map.paint(found, 24, tmp_path / "pairs.png")
    assert (tmp_path / "pairs.png").stat().st_size > 10_000


@pytest.mark.parametrize(("coupling", "word"), [("probability", "None"), ("token-order", "i")])
def test_the_coupling_orders_the_words_likeliest_first_or_by_id(coupling, word):
    pairs, _ = pair_map.sample_pairs(torch.tensor([[0.95, 0.01]], dtype=torch.float64), coupling)
    assert [pair_map.WORDS[each] for each in pairs[0]] == ["return", word]


def test_the_coupling_of_drafters_in_pieces_reaches_every_command():
    options = {"work": Path("w"), "model": "m", "device": "cpu", "prompts": Path("p"), "check": Path("c")}
    options |= {"batch_size": 1, "tokens": 2, "steps": None}
    for coupling in (None, "gumbel", "token-order"):
        for _, _, command in drafters_in_pieces.stages(argparse.Namespace(**options, coupling=coupling)):
            words = " ".join(command)
            given = f"--coupling {coupling}" in words or f"--set coupling={coupling}" in words
            assert given == (coupling is not None) == ("coupling" in words)
