"""PTP's two theorems by enumeration on a toy law: uniforms decide the text, and earlier ones leave the law as it is."""

import math
from itertools import product

import numpy as np
import pytest

from saltus.core.picking import Distribution, pick, probabilities, uniform_interval
from saltus.core.sampling import Sampling, token_distribution
from saltus.testing import text_probabilities, toy_network

VOCAB, LENGTH, PROMPT = 4, 3, [2, 1]
TARGET = toy_network(VOCAB, logit_scale=1.5)
SAMPLING = [
    Sampling(temperature=1.0, coupling="probability"),
    Sampling(temperature=0.7, top_k=3, coupling="token-order"),
    Sampling(temperature=1.3, top_p=0.8, coupling="probability"),
]


def following(text: list[int], sampling: Sampling) -> Distribution:
    """The toy's law after a text."""
    return token_distribution(TARGET.logits[text[-2], text[-1]], sampling, np.array(text), len(text) - len(PROMPT))


def written(uniforms, sampling: Sampling) -> list[int]:
    """f_P(t_<i; u_i … u_k): the text that the uniforms decide (PTP, Eq. 4)."""
    text = list(PROMPT)
    for u in uniforms:
        text.append(pick(u, following(text, sampling)))
    return text[len(PROMPT) :]


def cells(text: tuple[int, ...], sampling: Sampling) -> list[tuple[float, float]]:
    """The box of uniforms that writes a text, [low, high) for each token."""
    return [uniform_interval(token, following([*PROMPT, *text[:k]], sampling)) for k, token in enumerate(text)]


@pytest.mark.parametrize("sampling", SAMPLING)
def test_theorem_1_every_box_of_uniforms_writes_its_text_and_the_boxes_fill_the_cube(sampling):
    volumes = []
    for text in product(range(VOCAB), repeat=LENGTH):
        box = cells(text, sampling)
        volumes.append(math.prod(high - low for low, high in box))
        if volumes[-1] > 0:
            corners = product(*((low, (low + high) / 2, math.nextafter(high, 0)) for low, high in box))
            assert all(written(corner, sampling) == list(text) for corner in corners)
    assert math.fsum(volumes) == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(volumes, text_probabilities(TARGET, PROMPT, LENGTH, sampling), atol=1e-12)


@pytest.mark.parametrize("sampling", SAMPLING)
def test_theorem_2_the_law_given_earlier_uniforms_is_the_law_given_earlier_tokens(sampling):
    """Given u_i … u_{k−1} anywhere in their box, the measure of the u_k that write a token is its conditional law."""
    for text in product(range(VOCAB), repeat=LENGTH - 1):
        box = cells(text, sampling)
        if any(low == high for low, high in box):
            continue
        expected = probabilities(following([*PROMPT, *text], sampling), VOCAB)
        for place in (0.0, 0.3, 1 - 2.0**-20):
            given = [low + place * (high - low) for low, high in box]
            own = written(given, sampling)
            measure = [high - low for low, high in (cells((*own, token), sampling)[-1] for token in range(VOCAB))]
            np.testing.assert_allclose(measure, expected, atol=1e-12)


@pytest.mark.slow
def test_independent_prediction_writes_pairs_that_the_law_never_writes():
    """Theorem 2 fails without the uniforms: picks from marginals combine tokens that exclude each other."""
    sampling, uniforms = Sampling(temperature=0.7, top_k=2, coupling="probability"), np.linspace(0.01, 0.99, 50)
    pairs = text_probabilities(TARGET, PROMPT, 2, sampling).reshape(VOCAB, VOCAB)
    first, second = (Distribution(None, pairs.sum(axis)) for axis in (1, 0))
    mixed = [pairs[pick(u, first), pick(v, second)] for u in uniforms for v in uniforms]
    own = [pairs[tuple(written((u, v), sampling))] for u in uniforms for v in uniforms]
    assert min(own) > 0
    assert np.mean(np.array(mixed) == 0) > 0.1
