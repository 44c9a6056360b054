"""Prove that a text's uniforms are uniform, independent, and a function of (seed, stream, position) alone."""

from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from saltus.core.noise import BLOCK, Noise, _block

seeds = st.integers(0, 2**64 - 1)
positions = st.lists(st.integers(0, 4 * BLOCK), max_size=40)


@given(seeds, positions, st.randoms())
def test_a_uniform_does_not_depend_on_what_else_is_asked_or_in_which_order(seed, places, shuffler):
    together = Noise(seed).uniforms("text", places)
    shuffled = shuffler.sample(range(len(places)), len(places))
    assert np.array_equal(Noise(seed).uniforms("text", [places[i] for i in shuffled]), together[shuffled])
    _block.cache_clear()
    alone = [Noise(seed).uniforms("text", [place])[0] for place in places]
    assert together.tolist() == alone == [Noise(seed).uniform("text", place) for place in places]


def test_looking_across_the_border_of_a_block_gives_what_each_side_gives():
    noise, border = Noise(7), 3 * BLOCK
    across = noise.uniforms("text", np.arange(border - 5, border + 5))
    assert np.array_equal(across[:5], noise.uniforms("text", np.arange(border - 5, border)))
    assert np.array_equal(across[5:], noise.uniforms("text", np.arange(border, border + 5)))
    assert len(set(noise.uniforms("text", np.arange(4 * BLOCK)).tolist())) == 4 * BLOCK  # no block repeats another


def test_the_uniforms_of_a_seed_are_the_same_on_every_machine_and_in_every_version():
    golden = [
        0.5000630474210325,
        0.6799334387460817,
        0.5196710915363665,
        0.15510833716737327,
        0.8002980126972318,
        0.2607057651532555,
    ]
    found = [*Noise(0).uniforms("text", [0, 1, 1023, 1024, 10**9]), *Noise(2**64).uniforms("accept/2", [5])]
    assert found == golden


def test_a_uniform_is_the_word_that_one_long_philox_sequence_has_at_its_position():
    key = np.frombuffer(blake2b(b"11/text", digest_size=16).digest(), dtype="<u8")
    words = np.random.Philox(key=key).random_raw(3 * BLOCK)
    assert np.array_equal(Noise(11).uniforms("text", np.arange(3 * BLOCK)), (words >> np.uint64(11)) / 2.0**53)


@pytest.mark.parametrize(("seed", "stream"), [(0, "text"), (1, "text"), (2**64 - 1, "accept/0"), (5, "")])
def test_uniforms_are_uniform_on_the_half_open_unit_interval(seed, stream):
    u = Noise(seed).uniforms(stream, np.arange(50_000))
    assert u.min() >= 0
    assert u.max() < 1
    assert stats.kstest(u, "uniform").pvalue > 1e-3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, "text", 0), (1, "text", 0)),
        ((0, "text", 0), (2**32, "text", 0)),
        ((0, "text", 0), (2**64, "text", 0)),
        ((0, "text", 0), (0, "accept/0", 0)),
        ((0, "accept/1", 0), (0, "accept/2", 0)),
        ((1, "2/text", 0), (12, "/text", 0)),
        ((0, "ab", 0), (0, "ba", 0)),
        ((0, "text", 0), (0, "text", 1)),
        ((0, "text", 0), (0, "text", BLOCK)),
    ],
)
def test_seeds_streams_and_positions_are_independent(one, other):
    def cell(seed, stream, shift):
        return (Noise(seed).uniforms(stream, np.arange(shift, shift + 50_000)) * 8).astype(int)

    counts = np.bincount(cell(*one) * 8 + cell(*other), minlength=64)
    assert stats.chisquare(counts).pvalue > 1e-3


def test_the_shape_of_the_positions_is_the_shape_of_the_uniforms():
    noise = Noise(3)
    assert noise.uniforms("text", []).shape == (0,)
    assert noise.uniforms("text", 4).shape == ()
    assert noise.uniforms("text", range(4)).shape == (4,)
    assert noise.uniforms("text", [[1, 2, 3], [4, 5, 6 * BLOCK]]).shape == (2, 3)
    assert noise.uniforms("text", [[1, 2, 3], [4, 5, 6 * BLOCK]])[1, 0] == noise.uniforms("text", [4])[0]


def test_changing_what_was_returned_does_not_change_the_noise():
    before = Noise(9).uniforms("text", [1, 2]).copy()
    Noise(9).uniforms("text", [1, 2])[:] = 0
    assert np.array_equal(Noise(9).uniforms("text", [1, 2]), before)


def test_negative_seeds_and_positions_are_refused():
    with pytest.raises(ValueError, match="seed is -1, but must be 0 or more"):
        Noise(-1)
    with pytest.raises(ValueError, match="position -3, but positions start at 0"):
        Noise(0).uniforms("text", [4, -3])
