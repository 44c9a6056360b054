"""Uniform intervals of given texts: those of whole tensors equal those of the sampling pipeline."""

import numpy as np
import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ptp_lab import SkippedTokens
from saltus.core.picking import pick, probability, uniform_interval
from saltus.core.sampling import Sampling, token_distribution
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.uniform_intervals import (
    UniformIntervals,
    pick_tokens,
    sample_uniforms,
    uniform_intervals,
)


def logits(*shape: int, sharp: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(seeded_generator(seed, "logits").normal(size=shape) * sharp).float()


def text_uniform_intervals(
    logits: Float[Tensor, "length vocab"],
    tokens: Int[Tensor, "length"],
    sampling: Sampling,
    previous_tokens: np.ndarray,
    first_index: int,
) -> UniformIntervals:
    """The intervals of a text's tokens, row by row with the sampling pipeline."""
    text = np.concatenate([previous_tokens, tokens.numpy()])
    intervals = []
    for k, row in enumerate(logits):
        before = text[: len(previous_tokens) + k]
        intervals.append(uniform_interval(int(tokens[k]), token_distribution(row, sampling, before, first_index + k)))
    low, high = torch.tensor(intervals, dtype=torch.float64).T
    return UniformIntervals(low, high)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("sharp", [0.3, 3.0])
def test_intervals_of_whole_tensors_are_those_of_the_sampling_pipeline(temperature, sharp):
    rows = logits(40, 25, sharp=sharp)
    rows[:, 5] = rows[:, 7]  # ties go to the lower id
    sampling = Sampling(temperature=temperature, coupling="probability")
    for token in range(25):
        found = uniform_intervals(rows, torch.full((40,), token), temperature)
        expected = [uniform_interval(token, token_distribution(row, sampling)) for row in rows]
        np.testing.assert_allclose(torch.stack([found.low, found.high], 1), expected, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_picks_of_whole_tensors_are_those_of_the_sampling_pipeline():
    rows, uniforms = logits(500, 25), torch.from_numpy(seeded_generator(1, "u").random(500))
    uniforms[:2] = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    found = pick_tokens(uniforms, rows, coupling="probability")
    expected = [
        pick(float(u), token_distribution(row, Sampling(temperature=1.0, coupling="probability")))
        for u, row in zip(uniforms, rows, strict=True)
    ]
    assert found.tolist() == expected


def test_a_uniform_at_an_interval_s_end_picks_the_next_token():
    rows = torch.zeros(5, 4)
    assert pick_tokens(torch.tensor([0.0, 0.25, 0.5, 0.75, 0.74], dtype=torch.float64), rows).tolist() == [
        0,
        1,
        2,
        3,
        2,
    ]


@pytest.mark.parametrize("order", ["probability", "token-order"])
@pytest.mark.parametrize("b", [2.0, 1.0, 0.5, float("inf")])
def test_a_placed_uniform_picks_its_token(b, order):
    rows = logits(300, 25)
    tokens = torch.from_numpy(seeded_generator(2, "tokens").integers(25, size=300))
    uniforms, holds = sample_uniforms(uniform_intervals(rows, tokens, coupling=order), seeded_generator(3, "place"), b)
    assert holds.float().mean() > 0.99
    assert torch.equal(pick_tokens(uniforms, rows, coupling=order)[holds], tokens[holds])


def test_uniforms_placed_for_drawn_tokens_are_uniform():
    rows = logits(1, 8, sharp=1.0).expand(20_000, -1)
    tokens = pick_tokens(torch.from_numpy(seeded_generator(4, "u").random(20_000)), rows)
    uniforms, _ = sample_uniforms(uniform_intervals(rows, tokens), seeded_generator(5, "place"))
    counts, _ = np.histogram(uniforms, bins=20, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 45  # chi-square with 19 degrees of freedom, one in a thousand


def test_intervals_of_a_text_follow_every_sampling_setting():
    rows, tokens = logits(6, 30), torch.tensor([3, 9, 9, 1, 0, 4])
    sampling = Sampling(0.8, 12, 0.9, repetition_penalty=1.3, forced_at_index=((12, 1),), coupling="probability")
    before = np.array([4, 4, 9])
    found = text_uniform_intervals(rows, tokens, sampling, before, first_index=9)
    text = np.concatenate([before, tokens.numpy()])
    for k in range(6):
        one = token_distribution(rows[k], sampling, text[: 3 + k], 9 + k)
        assert (float(found.low[k]), float(found.high[k])) == uniform_interval(int(tokens[k]), one)
        assert float(found.high[k] - found.low[k]) == pytest.approx(probability(int(tokens[k]), one), abs=1e-12)
    assert (float(found.low[3]), float(found.high[3])) == (0.0, 1.0), "a forced token has every uniform"


def test_tokens_outside_their_intervals_are_counted_and_shown():
    rows = logits(4, 10)
    rows[1, 2] = -1e4  # weight 0: no uniform picks it
    tokens, skipped = torch.tensor([2, 2, 2, 2]), SkippedTokens()
    intervals = uniform_intervals(rows, tokens)
    _, holds = sample_uniforms(intervals, seeded_generator(0, "place"))
    assert holds.tolist() == [True, False, True, True]
    skipped.record(holds, tokens, intervals)
    assert (skipped.num_tokens, skipped.num_skipped) == (4, 1)
    assert "1 of 4 tokens were skipped" in str(skipped)
    assert "2 in [" in str(skipped)


def test_an_impossible_place_is_refused():
    zeros = torch.zeros(2, dtype=torch.float64)
    with pytest.raises(ValueError, match="b is 0"):
        sample_uniforms(UniformIntervals(zeros, zeros + 1), seeded_generator(0, "place"), 0.0)
