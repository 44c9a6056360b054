"""Prove that each coupling samples the distribution, and that Gumbel noise makes two distributions agree."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from test_sampling import laws, rows

from saltus.core import distributions
from saltus.core import noise as noise_module
from saltus.core.canvas import continuation
from saltus.core.coupling import (
    PARALLEL_ERROR,
    SEQUENTIAL_ERROR,
    _GumbelMaxSearch,
    best_tokens,
    draft_tokens,
    gumbel_max_token,
    pick_token,
)
from saltus.core.distributions import TargetDistributions
from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.core.noise import GROUP_SIZE, GROUP_STRIDE, Noise, TokenNoise, groups_of
from saltus.core.picking import Distribution, pick, probabilities, probability, uniform_interval
from saltus.core.sampling import Sampling, token_distribution
from saltus.kernels import native
from sampled_laws import keeps_law

COUPLINGS = ["probability", "token-order", "gumbel"]
every_coupling = pytest.mark.parametrize("coupling", COUPLINGS)
SAMPLINGS = [Sampling(1.0), Sampling(0.5, top_k=9), Sampling(1.3, top_p=0.8), Sampling(0.9, min_p=0.1, banned=(2, 3))]


def exponentials(noise: Noise, position: int, vocab: int, stream: str = "text") -> np.ndarray:
    """E of all tokens, said once more for arrays."""
    numbers, tokens = noise.of_tokens(stream, position, vocab), np.arange(vocab)
    groups = groups_of(tokens)
    excess = -np.log1p(-noise_module._open_uniforms(noise_module._hash(tokens.astype(np.uint64), *numbers.keys)))
    least = -np.log1p(-numbers.uniforms[groups]) / GROUP_SIZE
    return np.where(tokens == numbers.tokens[groups], least, least + excess)


def ranking(law: Distribution, noise: Noise, position: int) -> list[int]:
    """All tokens by falling w/E, said once more."""
    ids = np.arange(len(law.weights)) if law.tokens is None else law.tokens
    values = law.weights / exponentials(noise, position, int(ids[-1]) + 1)[ids]
    order = sorted(np.flatnonzero(law.weights).tolist(), key=lambda place: (-values[place], ids[place]))
    return ids[order].tolist()


# picking


@given(laws(), st.integers(0, 100), st.integers(1, 5))
def test_the_best_tokens_are_those_of_the_whole_search(law, position, count):
    law, noise = replace(law, coupling="gumbel"), Noise(5)
    found = best_tokens(law, noise, "text", position, count)
    assert [token for token, _ in found] == ranking(law, noise, position)[:count]
    assert pick_token(law, noise, "text", position) == found[0][0]
    assert all(math.isfinite(value) for _, value in found)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [1_000, 1_024, 1_025, 49_152, 65_536, 65_537, 70_000])
@pytest.mark.parametrize("sharp", [0.0, 0.5, 3.0])
def test_no_vocabulary_is_too_large_or_too_odd(vocab, sharp):
    logits, noise = rows(vocab, torch.float32, 3, sharp), Noise(1)
    law = token_distribution(logits, Sampling(1.0, coupling="gumbel"))
    for position in range(3):
        expected = ranking(law, noise, position)
        assert [token for token, _ in best_tokens(law, noise, "text", position, 3)] == expected[:3]
        sparse = Distribution(np.arange(0, vocab, 3), law.weights[::3], "gumbel")
        assert pick_token(sparse, noise, "text", position) == next(token for token in expected if token % 3 == 0)


# the compiled search


needs_kernels = pytest.mark.skipif(native.load_kernels() is None, reason="no compiled kernels")


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1, 7, 300, 1_024, 1_041, 49_152, 70_000])
def test_the_compiled_search_has_the_same_winners(vocab, dtype):
    for seed, (sharp, temperature) in enumerate([(0.0, 1.0), (1.0, 0.7), (3.0, 1.0), (3.0, 1e-3), (1.0, 5.0)]):
        logits = rows(vocab, dtype, seed, sharp)
        logits[1::3] = -math.inf
        law = token_distribution(logits, Sampling(temperature))
        for position in range(5):
            token = gumbel_max_token(logits, temperature, Noise(seed), "text", position)
            assert token == pick_token(law, Noise(seed), "text", position)


@needs_kernels
def test_the_compiled_search_leaves_open_what_rounding_may_decide():
    close = 0
    for position in range(400):
        values = np.log(exponentials(Noise(0), position, 2))
        logits = torch.tensor([0.0, values[1] - values[0]], dtype=torch.float32)
        margin = abs(float(logits[1]) - (values[1] - values[0]))
        token = gumbel_max_token(logits, 1.0, Noise(0), "text", position)
        close += margin < 9e-10
        assert token is None if margin < 9e-10 else token is not None or margin < 1.1e-9
    assert close > 2


@needs_kernels
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_compiled_search_is_not_run_on_broken_logits(value):
    logits = torch.zeros(3_000)
    logits[2_999] = value
    assert gumbel_max_token(logits, 1.0, Noise(0), "text", 0) is None
    assert gumbel_max_token(torch.full((40,), -math.inf), 1.0, Noise(0), "text", 0) is None


@pytest.mark.slow
def test_padding_and_truncation_do_not_change_what_the_other_tokens_are_worth():
    law = token_distribution(rows(3_000, torch.float32, 7), Sampling(1.0, coupling="gumbel"))
    padded = Distribution(None, np.append(law.weights, np.zeros(70_000)), "gumbel")
    kept = np.flatnonzero(law.weights > 0.05)
    truncated = Distribution(kept, law.weights[kept], "gumbel")
    agreements = 0
    for position in range(200):
        token = pick_token(law, Noise(2), "text", position)
        assert pick_token(padded, Noise(2), "text", position) == token
        if token in kept:
            agreements += 1
            assert pick_token(truncated, Noise(2), "text", position) == token
    assert agreements > 50


def test_of_equal_values_the_lower_id_comes_first():
    class Equal(TokenNoise):
        def exponential(self, token):
            return 0.5

    search = _GumbelMaxSearch(Equal((1, 2), *(np.ones(1),) * 3), 2)
    for token in (7, 3, 5):
        search.add(token, 0.25)
    assert [token for _, token in search.best] == [3, 5]


def test_token_order_sums_the_probabilities_of_ids():
    law = Distribution(np.array([3, 5, 8]), np.array([0.2, 0.3, 0.5]), "token-order")
    assert [pick(u, law) for u in (0.0, 0.19, 0.21, 0.49, 0.51, 0.99)] == [3, 3, 5, 5, 8, 8]


@given(laws())
def test_in_token_order_the_intervals_tile_the_unit_interval_by_id(law):
    law, edge = replace(law, coupling="token-order"), 0.0
    for token in range(len(law.weights)) if law.tokens is None else law.tokens.tolist():
        low, high = uniform_interval(token, law)
        assert low == edge
        assert low == high or pick(low, law) == token == pick(math.nextafter(high, 0), law)
        edge = high
    assert edge == 1


def is_law_kept(coupling: str, sampling: Sampling) -> bool:
    """By the picks at many positions."""
    law, noise = token_distribution(rows(300, torch.bfloat16, seed=4), replace(sampling, coupling=coupling)), Noise(1)
    return keeps_law(lambda position: pick_token(law, noise, "text", position), probabilities(law, 300), 20_000)


@pytest.mark.slow
@every_coupling
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["temperature", "top-k", "top-p", "min-p"])
@pytest.mark.unchecked
def test_picks_follow_the_distribution(coupling, sampling):
    assert is_law_kept(coupling, sampling)


@pytest.mark.slow
@pytest.mark.unchecked
def test_a_biased_noise_is_noticed(monkeypatch):
    honest = noise_module._open_uniforms
    monkeypatch.setattr(noise_module, "_open_uniforms", lambda words: honest(words) ** 1.5)
    noise_module._token_noise.cache_clear()
    try:
        assert not is_law_kept("gumbel", Sampling(1.0))
    finally:
        noise_module._token_noise.cache_clear()


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.parametrize("error", [0.1, 0.5, 1.5])
def test_two_distributions_agree_as_often_as_the_theorem_says(error):
    """Daliri et al. 2024: (1 − D)/(1 + D) or more, D being their total variation distance; never above 1 − D."""
    rng, count = np.random.default_rng(0), 4_000
    one = Distribution(None, np.exp(rng.normal(size=400) * 1.5), "gumbel")
    other = Distribution(None, one.weights * np.exp(rng.normal(size=400) * error), "gumbel")
    distance = np.abs(probabilities(one, 400) - probabilities(other, 400)).sum() / 2
    same = sum(
        pick_token(one, Noise(0), "text", place) == pick_token(other, Noise(0), "text", place) for place in range(count)
    )
    margin = 4 * math.sqrt(count / 4)
    assert (1 - distance) / (1 + distance) * count - margin < same < (1 - distance) * count + margin
    ordered = [replace(law, coupling="probability") for law in (one, other)]
    by_probability = sum(
        pick(u, ordered[0]) == pick(u, ordered[1]) for u in Noise(0).uniforms("text", np.arange(count)).tolist()
    )
    assert same > by_probability


# the noise of tokens


def samples(kind: str, count: int = 20_000) -> np.ndarray:
    """Exponentials that should be independent, taken along tokens, along positions, or along seeds."""
    if kind == "tokens":
        return exponentials(Noise(0), 0, count)
    if kind == "a group":
        return np.concatenate([exponentials(Noise(0), place, 65_536)[5::GROUP_STRIDE] for place in range(count // 64)])
    if kind == "positions":
        return np.array([Noise(3).of_tokens("text", place, 8).exponential(7) for place in range(count)])
    return np.array([Noise(seed).of_tokens("text", 4, 8).exponential(7) for seed in range(count // 10)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tokens", "a group", "positions", "seeds"])
def test_noise_is_exponential_and_neighbours_are_independent(kind):
    found = samples(kind)
    assert found.min() > 0
    assert stats.kstest(found, "expon").pvalue > 1e-3
    cells = np.minimum((-np.expm1(-found) * 8).astype(int), 7)
    for distance in (1, 2, 64, 1_024):
        counts = np.bincount(cells[distance:] * 8 + cells[:-distance], minlength=64)
        assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, "text", 0), (1, "text", 0)),
        ((0, "text", 0), (2**64, "text", 0)),
        ((0, "text", 0), (0, "ptp/0", 0)),
        ((0, "text", 0), (0, "text", 1)),
        ((0, "text", 0), (0, "text", 512)),
    ],
)
def test_the_noise_of_seeds_streams_and_positions_is_independent(one, other):
    def cell(seed, stream, position):
        return np.minimum((-np.expm1(-exponentials(Noise(seed), position, 20_000, stream)) * 8).astype(int), 7)

    counts = np.bincount(cell(*one) * 8 + cell(*other), minlength=64)
    assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.slow
def test_noise_is_independent_of_the_uniform_of_its_position():
    u = Noise(4).uniforms("text", np.arange(20_000))
    first = [Noise(4).of_tokens("text", place, 1).exponential(0) for place in range(20_000)]
    cells = (u * 8).astype(int) * 8 + np.minimum((-np.expm1(-np.array(first)) * 8).astype(int), 7)
    assert stats.chisquare(np.bincount(cells, minlength=64)).pvalue > 1e-3


def test_any_token_of_a_group_is_its_least_equally_often():
    places = np.concatenate([Noise(8).of_tokens("text", place, 65_536).tokens >> 10 for place in range(100)])
    assert stats.chisquare(np.bincount(places, minlength=GROUP_SIZE)).pvalue > 1e-3


def test_rare_tokens_are_picked_at_their_rate():
    """A token of probability p ≪ 1 is picked where its E is below about p: numbers that small come as often as due."""
    least = np.concatenate([Noise(6).of_tokens("text", place, 65_536).uniforms for place in range(2_000)]) / GROUP_SIZE
    for p in (1e-6, 1e-5):
        expected = p * GROUP_SIZE * len(least)
        assert abs((least < p).sum() - expected) < 5 * math.sqrt(expected)
    numbers = Noise(6).of_tokens("text", 0, 2**20)
    tokens = np.arange(2**20)
    excess = numbers.exponential_bounds(tokens) - numbers.bounds[groups_of(tokens)]
    for p in (1e-5, 1e-4):
        others = len(tokens) - len(numbers.tokens)
        below = ((excess > 0) & (excess < p)).sum()
        assert abs(below - p * others) < 5 * math.sqrt(p * others)


def test_bounds_hold_and_are_close_for_small_numbers():
    numbers, tokens, noise = Noise(9).of_tokens("text", 3, 70_000), np.arange(70_000), Noise(9)
    exact, bounds = exponentials(noise, 3, 70_000), numbers.exponential_bounds(tokens)
    assert (bounds <= exact * (1 + 1e-12)).all()
    assert np.allclose(bounds[exact < 1e-3], exact[exact < 1e-3], rtol=2e-3)
    for token in range(0, 70_000, 13):
        assert math.isclose(numbers.exponential(token), exact[token], rel_tol=1e-12)


def test_no_uniform_is_zero_or_one():
    ends = noise_module._open_uniforms(np.array([0, 2**64 - 1], dtype=np.uint64))
    assert ends.tolist() == [2.0**-53, 1 - 2.0**-53]
    assert all(math.isfinite(math.log1p(-u)) and math.log1p(-u) < 0 for u in ends.tolist())


def test_the_noise_of_a_token_does_not_depend_on_the_size_of_the_vocabulary():
    small, large = (Noise(1).of_tokens("text", 2, vocab) for vocab in (100, 200_000))
    assert [small.exponential(token) for token in range(100)] == [large.exponential(token) for token in range(100)]


def test_the_noise_of_a_seed_is_the_same_in_every_version():
    numbers = Noise(0).of_tokens("text", 17, 49_152)
    assert numbers.keys == GOLDEN_KEYS
    assert [numbers.exponential(token) for token in (0, 1, 1_024, 49_151)] == pytest.approx(GOLDEN, rel=1e-14)


GOLDEN_KEYS = (11959131593924620069, 9717229347544404662)
GOLDEN = [4.37641382240214, 0.6055780813864257, 0.3537495346238895, 0.3450601634429622]


@pytest.mark.unchecked
def test_a_coupling_that_does_not_exist_and_a_negative_position_are_refused():
    with pytest.raises(ValueError, match="coupling is 'maximal', but must be one of probability, token-order, gumbel"):
        Sampling(1.0, coupling="maximal")
    with pytest.raises(ValueError, match="position -3, but positions start at 0"):
        Noise(0).of_tokens("text", -3, 10)


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.parametrize("error", [SEQUENTIAL_ERROR, PARALLEL_ERROR])
def test_estimates_of_acceptance_hold_for_the_errors_that_they_assume(error):
    """The target's log-probabilities are the draft's plus Gumbel noise of the assumed scale."""
    rng, count, stated, right = np.random.default_rng(1), 1_500, np.zeros(3), np.zeros(3)
    for position in range(count):
        logits = rng.normal(size=300) * 2
        draft = Distribution(None, np.exp(logits - logits.max()), "gumbel")
        wrong = logits + rng.gumbel(size=300) * error
        token = pick_token(Distribution(None, np.exp(wrong - wrong.max()), "gumbel"), Noise(0), "text", position)
        found = draft_tokens(draft, Noise(0), "text", position, 3, error)
        stated += [chance for _, chance in found]
        right += [one == token for one, _ in found]
    assert (right[:-1] > right[1:]).all()
    assert (stated[:-1] > stated[1:]).all()
    assert np.abs(stated - right).max() / count < 0.05


@pytest.mark.parametrize("coupling", ["probability", "token-order"])
def test_by_inverse_cdf_the_draft_is_the_pick_with_its_probability(coupling):
    law = Distribution(None, np.array([0.2, 0.5, 0.3]), coupling)
    for position in range(20):
        token = pick_token(law, Noise(0), "text", position)
        assert draft_tokens(law, Noise(0), "text", position, 3) == [(token, probability(token, law))]


class OddTokens:
    """A grammar of odd tokens."""

    def allowed(self, text):
        return np.arange(3_000) % 2 == 1

    def num_allowed(self, text, tokens):
        return 0

    def fast_forward(self, text, max_tokens):
        return ()


CHANGED = {
    "grammar": {},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "ngrams": {"no_repeat_ngram_size": 2},
    "biases": {"logit_bias": ((5, 3.0), (7, -math.inf)), "banned": (9,), "banned_at_index": ((0, 11),)},
    "forced": {"forced_at_index": ((0, 13),)},
    "end": {"min_new_tokens": 3, "end_tokens": (2, 4)},
}


@needs_kernels
@pytest.mark.parametrize("name", CHANGED)
def test_changed_logits_are_searched_by_the_kernel_too(name, monkeypatch):
    """And the winner is that of the whole distribution."""
    sampling, constraint = Sampling(1.0, **CHANGED[name]), OddTokens() if name == "grammar" else None
    inputs = ForwardInputs(continuation([5, 6, 7, 5, 6], 4), (7, 5), (-1, 0))
    for seed in range(20):
        outputs = ForwardOutputs(torch.stack([rows(3_000, torch.bfloat16, 3 * seed + node, 2.0) for node in range(3)]))
        searched = TargetDistributions(inputs, outputs, sampling, Noise(seed), constraint)
        whole = TargetDistributions(inputs, outputs, sampling, Noise(seed), constraint)
        nodes = [0, 1] if name == "forced" else [-1, 0, 1]
        expected = [pick_token(whole[node], Noise(seed), "text", whole.position(node)) for node in nodes]
        with monkeypatch.context() as patch:
            patch.setattr(distributions, "pick_token", None)
            assert [searched.pick(node) for node in nodes] == expected
        if name == "forced":
            assert searched.pick(-1) == 13
