"""Prove that laws are Transformers' laws, and that pick draws from them and can be inverted exactly."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from saltus.core.candidates import NUM_CANDIDATES, Candidates, truncated_distribution
from saltus.core.noise import Noise
from saltus.core.picking import (
    BLOCK,
    Distribution,
    one_hot,
    pick,
    probabilities,
    probability,
    residual,
    sample,
    uniform_interval,
)
from saltus.core.sampling import (
    MAX_BIAS,
    MAX_TEMPERATURE,
    Sampling,
    greedy_tokens,
    log_probabilities,
    log_probability,
    token_distribution,
)

ALMOST_ONE = math.nextafter(1, 0)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@st.composite
def laws(draw, most=3 * BLOCK) -> Distribution:
    """Dense and sparse laws of few or many tokens, with zeros and weights of all magnitudes between."""
    size = draw(st.integers(1, most))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    weights = rng.random(size) * 10.0 ** rng.integers(-draw(st.sampled_from([0, 5, 20, 320])), 1, size)
    weights[rng.random(size) < draw(st.sampled_from([0, 0.2, 0.9]))] = 0
    weights[rng.integers(size)] = draw(st.sampled_from([1.0, 0.3, 1 / 3]))
    tokens = np.sort(rng.choice(1_000, size, replace=False)) if draw(st.booleans()) else None
    return Distribution(tokens, weights)


def rows(size: int, dtype: torch.dtype, seed: int, sharp: float = 2.0) -> torch.Tensor:
    """Random logits. In 16 bits thousands of 50,000 are equal to others."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=size) * sharp).to(dtype)


# pick and its inverse


def places(law_: Distribution) -> list[int]:
    """The order in which tokens are picked, said once more: likely ones by falling weight, then the rest by id."""
    likely = [i for i, w in enumerate(law_.weights) if w > 0 and w >= law_.weights.max() / 1024]
    return sorted(likely, key=lambda i: (-law_.weights[i], i)) + sorted(set(range(len(law_.weights))) - set(likely))


def ids(law_: Distribution, order: list[int]) -> list[int]:
    return order if law_.tokens is None else law_.tokens[order].tolist()


@given(laws(), st.floats(0, 1, exclude_max=True))
def test_pick_is_the_first_token_whose_running_sum_exceeds_u(law_, u):
    order = places(law_)
    running = np.cumsum(law_.weights[order])
    assert math.isclose(running[-1], law_.total, rel_tol=1e-13)
    x = u * law_.total
    rank = ids(law_, order).index(pick(u, law_))
    slack = 1e-12 * law_.total  # of sums that are rounded in another order
    assert running[rank] > x - slack
    assert rank == 0 or running[rank - 1] <= x + slack
    if 0 < rank < len(law_.head):  # within the head, exactly
        assert running[rank - 1] <= (x if x > 2.0**-960 else 0) < running[rank]


@given(laws(), st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=20))
def test_a_token_is_picked_by_the_uniforms_of_its_interval_and_by_no_others(law_, uniforms):
    order = ids(law_, places(law_))
    for u in [*uniforms, 0.0, ALMOST_ONE]:
        token = pick(u, law_)
        low, high = uniform_interval(token, law_)
        assert low <= u < high
        assert pick(low, law_) == token == pick(math.nextafter(high, 0), law_)
        assert low == 0 or order.index(pick(math.nextafter(low, 0), law_)) < order.index(token)
        assert high == 1 or order.index(pick(high, law_)) > order.index(token)


@pytest.mark.slow
@given(laws(most=2 * BLOCK))
def test_the_intervals_of_all_tokens_tile_the_unit_interval_in_picking_order(law_):
    edge = 0.0
    for token in ids(law_, places(law_)):
        low, high = uniform_interval(token, law_)
        assert low == edge
        assert math.isclose(high - low, probability(token, law_), abs_tol=1e-12)
        edge = high
    assert edge == 1


def test_likelier_tokens_come_first_and_of_equals_lower_ids():
    law_ = Distribution(np.array([3, 5, 8, 9]), np.array([0.2, 0.4, 0.4, 0.0001]))
    assert [pick(u, law_) for u in (0.0, 0.39, 0.41, 0.79, 0.81, 0.99995, ALMOST_ONE)] == [5, 5, 8, 8, 3, 9, 9]


@given(laws(), st.floats(0, 1, exclude_max=True))
def test_a_token_of_zero_probability_is_never_picked_and_has_an_empty_interval(law_, u):
    assert all(probability(pick(x, law_), law_) > 0 for x in (u, 0.0, ALMOST_ONE))
    for token in np.setdiff1d(np.arange(20), np.flatnonzero(probabilities(law_, 1_000))).tolist():
        low, high = uniform_interval(token, law_)
        assert low == high


def test_rounding_at_the_end_of_a_block_falls_to_a_token_that_has_weight():
    """Block sums and running sums are rounded differently; the gap must not open for the zeros behind."""
    for seed in range(200):
        rng = np.random.default_rng(seed)
        weights = np.zeros(3 * BLOCK)
        for start in (0, BLOCK, 2 * BLOCK):
            weights[start : start + 100] = rng.random(100) * 10.0 ** rng.integers(-3, 3, 100)
        law_ = Distribution(None, weights)
        for border in law_.borders[1:]:
            u = border / law_.total
            for x in (math.nextafter(u, 0), math.nextafter(math.nextafter(u, 0), 0)):
                assert weights[pick(x, law_)] > 0


def test_running_sums_never_fall_however_small_the_last_weight_of_a_block_is():
    for seed in range(200):
        rng = np.random.default_rng(seed)
        weights = rng.random(2 * BLOCK)
        weights[-1] = 1e-14
        law_ = Distribution(None, weights)
        assert (np.diff([*law_.head_sums, *law_.block(0), *law_.block(1)]) >= 0).all()


@pytest.mark.parametrize("u", [-0.1, 1.0, math.nan])
def test_pick_refuses_what_is_no_uniform(u):
    with pytest.raises(ValueError, match=r"lies in \[0, 1\)"):
        pick(u, one_hot(3))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, coupling="probability"),
        Sampling(0.5, top_k=9, coupling="probability"),
        Sampling(1.3, top_p=0.8, coupling="probability"),
        Sampling(0.9, min_p=0.1, banned=(2, 3), coupling="probability"),
    ],
    ids=["temperature", "top-k", "top-p", "min-p"],
)
def test_picks_of_uniforms_have_the_law(sampling):
    law_ = token_distribution(rows(300, torch.bfloat16, seed=4), sampling)
    picks = [pick(u, law_) for u in Noise(1).uniforms("text", np.arange(20_000)).tolist()]
    counts, expected = np.bincount(picks, minlength=300), probabilities(law_, 300) * len(picks)
    assert not counts[expected == 0].any()
    assert _fit(counts, expected) > 1e-3
    warmer = probabilities(
        token_distribution(rows(300, torch.bfloat16, seed=4), Sampling(1.1 * sampling.temperature)), 300
    )
    assert _fit(counts, warmer * len(picks)) < 1e-6  # the test has the power to see a tenth of temperature


def _fit(counts: np.ndarray, expected: np.ndarray) -> float:
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    return stats.chisquare(observed[wanted > 0], wanted[wanted > 0]).pvalue


# the law is Transformers'


@pytest.fixture
def stable(monkeypatch):
    """Sort equal scores by id. torch's sort on x86 leaves their order to the vector unit; on CUDA it is by id."""
    sort = torch.sort
    monkeypatch.setattr(torch, "sort", lambda scores, **options: sort(scores, **{**options, "stable": True}))


def transformers_scores(logits: torch.Tensor, sampling: Sampling, context: np.ndarray) -> np.ndarray:
    """As `_get_logits_processor` of generate orders them."""
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.no_repeat_ngram_size:
        processors.append(NoRepeatNGramLogitsProcessor(sampling.no_repeat_ngram_size))
    if sampling.min_new_tokens:  # `assert_law_is_transformers` asks for the first new token
        processors.append(
            MinNewTokensLengthLogitsProcessor(len(context), sampling.min_new_tokens, list(sampling.end_tokens))
        )
    if sampling.banned:
        processors.append(SuppressTokensLogitsProcessor(sampling.banned))
    if sampling.temperature not in (0, 1):
        processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        processors.append(MinPLogitsWarper(sampling.min_p))
    return processors(torch.from_numpy(context)[None], logits[None].float())[0].numpy()


def assert_law_is_transformers(logits: torch.Tensor, sampling: Sampling, context: np.ndarray):
    scores = transformers_scores(logits, sampling, context).astype(np.float64)
    weights = np.exp(scores - scores.max())
    ours = token_distribution(logits, sampling, context)
    found = probabilities(ours, len(logits))
    assert np.array_equal(np.flatnonzero(found), np.flatnonzero(weights))
    assert np.allclose(found, weights / weights.sum(), rtol=1e-5, atol=0)
    if ours.tokens is not None:
        assert ours.weights.all()
        assert (np.diff(ours.tokens) > 0).all()


SETTINGS = [
    Sampling(1.0),
    Sampling(0.7),
    Sampling(1.0, top_k=1),
    Sampling(1.0, top_k=50),
    Sampling(1.0, top_k=5_000),
    Sampling(1.0, top_k=10**6),
    Sampling(1.0, top_p=0.9),
    Sampling(1.0, top_p=0.5),
    Sampling(1.0, top_p=0.999),
    Sampling(1.0, top_p=1e-9),
    Sampling(1.0, min_p=0.05),
    Sampling(1.0, min_p=1.0),
    Sampling(1.0, banned=(0, 3, 7, 10**6)),
    Sampling(1.0, repetition_penalty=1.3),
    Sampling(1.0, no_repeat_ngram_size=1),
    Sampling(0.7, no_repeat_ngram_size=3, repetition_penalty=1.2),
    Sampling(0.7, min_new_tokens=4, end_tokens=(0, 5, 10**6), top_k=40),
    Sampling(0.8, top_k=50, top_p=0.95, min_p=0.02, repetition_penalty=1.1, banned=(5, 6)),
]


@pytest.mark.usefixtures("stable")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_each_setting_keeps_and_weighs_the_tokens_that_transformers_does(sampling, dtype):
    for size, sharp in [(12_000, 2.0), (9_999, 4.0), (1_000, 0.5), (63, 3.0), (2, 1.0)]:
        assert_law_is_transformers(rows(size, dtype, 1, sharp), sampling, np.arange(0, size, 3))


@pytest.mark.slow
@pytest.mark.usefixtures("stable")
@settings(max_examples=300)
@given(st.data())
def test_all_settings_together_keep_and_weigh_the_tokens_that_transformers_does(data):
    size = data.draw(st.sampled_from([2, 5, 64, 65, 700, 3_000]))
    sharp = data.draw(st.sampled_from([0.0, 0.01, 1.0, 3.0, 10.0]))
    logits = rows(size, data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(0, 2**32)), sharp)
    probabilities = st.floats(1e-6, 1) | st.sampled_from([0.1, 0.5, 0.9, 0.95, 1.0])
    sampling = Sampling(
        temperature=data.draw(st.floats(0.05, 3) | st.just(1.0)),
        top_k=data.draw(st.integers(0, size + 3)),
        top_p=data.draw(probabilities),
        min_p=data.draw(st.just(0.0) | probabilities),
        repetition_penalty=data.draw(st.floats(0.5, 2) | st.just(1.0)),
        banned=tuple(data.draw(st.lists(st.integers(0, size - 2), max_size=3))),
    )
    context = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=8)), dtype=np.int64)
    assert_law_is_transformers(logits, sampling, context)


@pytest.mark.usefixtures("stable")
@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75, 0.875, 0.9, 1 - 2**-12])
@pytest.mark.parametrize("size", [8, 4_096, 49_152])
def test_a_mass_that_ends_exactly_at_top_p_is_rounded_as_transformers_rounds_it(size, top_p):
    assert_law_is_transformers(torch.zeros(size), Sampling(1.0, top_p=top_p), np.arange(1))
    assert_law_is_transformers(torch.arange(size) % 4 * math.log(2), Sampling(1.0, top_p=top_p), np.arange(1))


@pytest.mark.parametrize("seed", range(5))
def test_of_tokens_that_tie_at_the_border_of_top_p_as_many_are_kept_as_by_any_sort(seed):
    """Which of them, torch's unstable sort leaves open; here the higher ids, on every machine."""
    logits = rows(9_000, torch.bfloat16, seed, sharp=3.0).round()
    theirs = transformers_scores(logits, Sampling(1.0, top_p=0.9), np.arange(1))
    ours = token_distribution(logits, Sampling(1.0, top_p=0.9)).tokens
    scores = logits.float().numpy()
    assert np.array_equal(np.sort(scores[ours]), np.sort(scores[theirs > -np.inf]))
    border = scores[ours].min()
    assert (scores == border).sum() > (scores[ours] == border).sum()  # some of the equals are kept, some not
    assert np.flatnonzero(scores == border)[-1] in ours


def candidates_of(logits: torch.Tensor, temperature: float, error: float = 0.0) -> Candidates:
    """As a device finds them, with such an error of the sum."""
    scores = logits.float()
    best, tokens = scores.topk(min(NUM_CANDIDATES, len(scores)))
    total = ((scores - scores.max()) / temperature).exp().sum(dtype=torch.float64).item()
    return Candidates(tokens.numpy(), best.numpy(), total * (1 + error), len(scores))


@settings(deadline=None)
@given(
    st.integers(0, 2**32), st.sampled_from([5, 100, 4_000, 30_000]), st.sampled_from(DTYPES),
    st.sampled_from([1.0, 4.0]), st.sampled_from([0, 1, 5, 40, 150]), st.sampled_from([0.0, 0.2, 0.9, 0.95, 1.0]),
    st.sampled_from([0.0, 0.01, 0.2]), st.sampled_from([0.5, 1.0, 1.3]), st.floats(-4e-6, 4e-6),
)  # fmt: skip
def test_the_likeliest_tokens_give_the_whole_rows_distribution_or_none(
    seed, size, dtype, sharp, top_k, top_p, min_p, temperature, error
):
    logits, sampling = rows(size, dtype, seed, sharp), Sampling(temperature, top_k, top_p, min_p)
    if not sampling.needs_candidates:
        return
    found = truncated_distribution(candidates_of(logits, temperature, error), sampling)
    if found is not None:
        expected = token_distribution(logits, sampling)
        tokens = np.arange(len(expected.weights)) if expected.tokens is None else expected.tokens
        assert found.tokens.tolist() == tokens.tolist()
        assert found.weights.tolist() == expected.weights.tolist()


def test_where_the_likeliest_tokens_are_enough_they_are_used():
    logits = rows(50_000, torch.float32, 1, sharp=4.0)
    for sampling in (Sampling(0.7, top_p=0.9), Sampling(1.0, top_k=50), Sampling(1.0, top_k=40, top_p=0.95),
                     Sampling(1.0, min_p=0.1)):  # fmt: skip
        assert truncated_distribution(candidates_of(logits, sampling.temperature), sampling) is not None
    for sampling in (Sampling(1.0, top_p=0.9999), Sampling(1.0, top_k=NUM_CANDIDATES), Sampling(1.0, min_p=1e-6)):
        assert truncated_distribution(candidates_of(logits, 1.0), sampling) is None
    tied = torch.zeros(1_000)
    tied[:3] = 2.0
    assert truncated_distribution(candidates_of(tied, 1.0), Sampling(1.0, top_k=5)) is None
    assert truncated_distribution(candidates_of(tied * math.nan, 1.0), Sampling(1.0, top_k=2)) is None


def test_tokens_of_zero_weight_are_not_listed():
    law_ = token_distribution(torch.zeros(9), Sampling(1.0, top_k=5, banned=(0, 1, 2, 4, 5, 6)))
    assert law_.tokens.tolist() == [3, 7, 8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_greedy_is_the_first_maximum_after_penalty_and_bans(dtype):
    logits = torch.tensor([1.0, 4.0, 2.0, 4.0, 4.0, -1.0], dtype=dtype)
    assert token_distribution(logits, Sampling()).tokens.tolist() == [1]
    assert token_distribution(logits, Sampling(banned=(1,))).tokens.tolist() == [3]
    assert token_distribution(logits, Sampling(repetition_penalty=2.0), np.array([1, 3, 3])).tokens.tolist() == [4]
    assert [pick(u, token_distribution(logits, Sampling())) for u in (0.0, ALMOST_ONE)] == [1, 1]


def test_openais_bias_and_penalties_count_the_text_without_its_prompt():
    logits, context = torch.tensor([1.0, 2.0, 3.0, 4.0]), np.array([3, 3, 1, 2, 2, 1, 2])  # a prompt of 3 tokens
    sampling = Sampling(1.0, presence_penalty=0.25, frequency_penalty=0.5, logit_bias=((0, 1.5), (0, 0.5), (99, 1.0)))
    expected = torch.tensor([3.0, 2.0 - 0.25 - 0.5, 3.0 - 0.25 - 1.5, 4.0]).double().softmax(-1).numpy()
    assert probabilities(token_distribution(logits, sampling, context, index=4), 4) == pytest.approx(expected)
    assert probabilities(token_distribution(logits, sampling, context[:3], index=0), 4)[3] == pytest.approx(
        torch.tensor([3.0, 2.0, 3.0, 4.0]).double().softmax(-1)[3].item()
    )
    with pytest.raises(ValueError, match="a bias must be a number"):
        Sampling(logit_bias=((3, float("nan")),))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("penalty", [-MAX_BIAS, MAX_BIAS])
def test_the_greatest_temperature_and_penalties_leave_bans_and_numbers_as_they_are(penalty):
    sampling = Sampling(MAX_TEMPERATURE, presence_penalty=penalty, frequency_penalty=penalty, banned=(1, 2))
    law_ = probabilities(token_distribution(torch.zeros(5), sampling, np.array([3, 3, 3]), index=3), 5)
    assert law_[1] == law_[2] == 0 < law_[4], "a ban is one at every temperature"
    assert (law_[3] > law_[4]) == (penalty < 0)
    greedy = Sampling(presence_penalty=penalty, frequency_penalty=penalty)
    assert token_distribution(torch.zeros(5), greedy, np.array([3, 3, 3]), index=3).tokens.tolist() == [
        3 if penalty < 0 else 0
    ]


def test_a_forced_token_is_certain_at_its_index_and_only_there_even_if_banned():
    logits, sampling = rows(50, torch.float32, seed=0), Sampling(1.0, forced_at_index=((2, 7), (4, 9)), banned=(7,))
    assert probabilities(token_distribution(logits, sampling, index=2), 50).tolist() == np.eye(50)[7].tolist()
    assert pick(0.3, token_distribution(logits, sampling, index=4)) == 9
    assert probability(7, token_distribution(logits, sampling, index=3)) == 0
    assert len(token_distribution(logits, sampling, index=0).weights) == 50


def test_holes_in_the_context_are_not_penalised():
    logits, sampling = torch.tensor([1.0, 2.0, 3.0, 2.5]), Sampling(1.0, repetition_penalty=1.5)
    assert np.array_equal(
        token_distribution(logits, sampling, np.array([2, -1])).weights,
        token_distribution(logits, sampling, np.array([2])).weights,
    )
    with pytest.raises(ValueError, match="pass it as context"):
        token_distribution(logits, sampling)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_a_law_does_not_depend_on_the_batch_and_leaves_the_logits_alone(sampling):
    batch = torch.stack([rows(1_000, torch.float32, seed) for seed in range(6)])
    before, context = batch.clone(), np.arange(10)
    strided = batch.T.contiguous().T
    for i in range(6):
        alone = token_distribution(batch[i].clone(), sampling, context)
        for other in (
            token_distribution(batch[i], sampling, context),
            token_distribution(strided[i], sampling, context),
        ):
            assert np.array_equal(alone.weights, other.weights)
            assert alone.tokens is other.tokens or np.array_equal(alone.tokens, other.tokens)
    assert torch.equal(batch, before)


# greedy choices


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("shift", [0.0, 20.0, -20.0])
def test_choices_are_the_first_maxima_of_the_rows_in_float32(dtype, shift):
    logits = torch.stack([(rows(3_000, torch.float32, seed, 1.0) + shift).to(dtype) for seed in range(20)])
    expected = logits.float().numpy().argmax(-1)
    assert greedy_tokens(logits) == expected.tolist()
    assert greedy_tokens(logits[:, ::2]) == logits[:, ::2].float().numpy().argmax(-1).tolist()
    assert [token_distribution(row, Sampling()).tokens.item() for row in logits] == expected.tolist()
    assert greedy_tokens(logits[:0]) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_minus_zero_and_minus_infinity_are_ordered_as_floats_are(dtype):
    inf = math.inf
    table = [[-0.0, 0.0, -1.0], [0.0, -0.0, -1.0], [-inf, -2.0, -inf], [-3.0, -2.0, -2.0], [-inf, 5.0, 5.0]]
    assert greedy_tokens(torch.tensor(table, dtype=dtype)) == [0, 0, 1, 1, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_choices_and_laws_on_cuda_are_those_of_the_same_logits_on_the_cpu(dtype):
    logits = torch.stack([rows(49_152, dtype, seed, 1.0) for seed in range(16)])
    assert greedy_tokens(logits.cuda()) == greedy_tokens(logits)
    for sampling in SETTINGS:
        here, there = (token_distribution(row, sampling, np.arange(9)) for row in (logits[0], logits[0].cuda()))
        assert np.array_equal(here.weights, there.weights)
    with pytest.raises(ValueError, match="NaN logits in row 1"):
        greedy_tokens(torch.tensor([[1.0, 2.0], [math.nan, 1.0]], dtype=dtype, device="cuda"))


# broken logits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("value", "complaint"), [(math.nan, "NaN logits"), (-math.nan, "NaN logits"), (math.inf, "infinite logits")]
)
def test_logits_that_are_no_numbers_are_an_error_that_says_where_and_what_to_do(value, complaint, dtype):
    logits = torch.ones(3, 4_000, dtype=dtype)
    logits[1, 7] = value
    if math.isnan(value) and math.copysign(1, value) < 0:
        logits.view({2: torch.int16, 4: torch.int32}[dtype.itemsize])[1, 7] |= -(2 ** (8 * dtype.itemsize - 1))
    cure = "load it in float32 or bfloat16" if dtype == torch.float16 else "its weights may be damaged: fetch it again"
    with pytest.raises(ValueError, match=f"{complaint} in row 1; {cure}"):
        greedy_tokens(logits)
    for sampling in (Sampling(), Sampling(1.0), Sampling(0.5, top_k=4, top_p=0.9, min_p=0.1)):
        with pytest.raises(ValueError, match=f"{complaint} at new token 5; {cure}"):
            token_distribution(logits[1], sampling, index=5)


def test_a_row_without_any_token_left_is_an_error():
    nothing = torch.full((1, 4), -math.inf)
    with pytest.raises(ValueError, match="no token is left to choose in row 0"):
        greedy_tokens(nothing)
    for sampling in (Sampling(banned=(0, 1)), Sampling(1.0, banned=(0, 1)), Sampling(1.0, top_p=0.5, banned=(0, 1))):
        with pytest.raises(ValueError, match="at new token 0: all are banned"):
            token_distribution(torch.zeros(2), sampling)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, but must be 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        (
            {"temperature": 1.1e30},
            r"temperature is 1.1e\+30, but must be 0 \(greedy\) or a positive number of at most 1e",
        ),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": -0.1}, r"top_p is -0.1, but must lie in \[0, 1\]"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, but must lie in 1e-6…1e6"),
        ({"presence_penalty": -1e39}, r"presence_penalty is -1e\+39, but must be a number in ±1e\+30; use 0"),
        ({"frequency_penalty": 1e31}, r"frequency_penalty is 1e\+31, but must be a number in ±1e\+30"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"end_tokens": (3, -1)}, "end_tokens has -1, but ids and indices of tokens lie in 0…2147483647; remove it"),
        ({"banned": (3, -1)}, "banned has -1"),
        ({"banned": (2**70, *range(10**5))}, "banned has 1180591620717411303424, but"),
        ({"logit_bias": ((10**500, 1.0),)}, r"logit_bias has 10{79}…, but"),
        ({"forced_at_index": ((-1, 3),)}, "forced_at_index has -1"),
        ({"forced_at_index": ((1, -3),)}, "forced_at_index has -3"),
        ({"banned_at_index": ((-1, 3),)}, "banned_at_index has -1"),
        ({"hole_end_tokens": ((3, -1, 4),)}, "hole_end_tokens has -1"),
        ({"coupling": "x" * 1000}, "coupling is 'x{79}…, but must be one of"),
    ],
)
def test_settings_that_make_no_law_are_refused_in_one_line_that_says_the_cure(settings_, message):
    with pytest.raises(ValueError, match=message) as caught:
        Sampling(**settings_)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("limits", [{"temperature": 1e-8}, {"temperature": 1e-45}, {"temperature": 0.7, "top_p": 0.0}])
def test_what_leaves_the_likeliest_token_alone_is_greedy_decoding(limits):
    assert Sampling(**limits) == Sampling()


def test_ends_are_banned_until_enough_tokens_came_or_nothing_else_is_left():
    logits = torch.tensor([3.0, 1.0, 2.0, 0.0])
    sampling = Sampling(1.0, min_new_tokens=2, end_tokens=(0, 2))
    laws = [probabilities(token_distribution(logits, sampling, index=index), 4) for index in range(3)]
    assert [bool(law[[0, 2]].any()) for law in laws] == [False, False, True]
    only_end = torch.tensor([3.0, -torch.inf, -torch.inf, -torch.inf])  # as a grammar leaves it
    assert probabilities(token_distribution(only_end, sampling), 4)[0] == 1


def test_no_ngram_comes_twice_for_any_context():
    logits = torch.zeros(6)
    for text, size, banned in [
        ([1, 2, 3, 1, 2], 3, {3}), ([1, 2, 3, 1, 2], 2, {3}), ([1, 1, 1], 2, {1}), ([1, 2], 3, set()),
        ([4, 2], 1, {2, 4}), ([1, 2, 3, 1, 2, 4, 1, 2], 3, {3, 4}), ([1, 2, 3], 3, set()),
    ]:  # fmt: skip
        law = probabilities(token_distribution(logits, Sampling(1.0, no_repeat_ngram_size=size), np.array(text)), 6)
        assert set(np.flatnonzero(law == 0).tolist()) == banned, (text, size)


def test_the_bare_logits_decide_only_where_nothing_changes_them():
    assert Sampling().plain_argmax
    for changed in (
        {"temperature": 0.1},
        {"banned": (1,)},
        {"forced_at_index": ((0, 1),)},
        {"repetition_penalty": 1.1},
    ):
        assert not Sampling(**changed).plain_argmax


@given(laws(), st.floats(0, 1, exclude_max=True))
def test_what_is_drawn_has_weight(law_, u):
    assert _dense(law_)[sample(u, law_)] > 0


@pytest.mark.slow
@given(laws())
def test_evenly_spread_uniforms_draw_each_token_as_often_as_it_is_likely(law_):
    count = 2_000
    drawn = np.bincount([sample((i + 0.5) / count, law_) for i in range(count)], minlength=1_000)
    assert np.abs(drawn - count * _dense(law_)[:1_000]).max() <= 1 + 1e-6


# rejection


@given(laws(), laws())
def test_the_residual_is_the_excess_of_the_target_normalised(target, draft):
    excess = np.maximum(_dense(target) - _dense(draft), 0)
    if excess.sum() > 1e-6:
        assert np.allclose(_dense(residual(target, draft)), excess / excess.sum(), rtol=1e-9, atol=1e-9)


@given(laws(), laws())
def test_accepting_or_replacing_a_draft_gives_the_target_law(target, draft):
    p, q = _dense(target), _dense(draft)
    accepted = np.minimum(p, q)
    written = accepted + (1 - accepted.sum()) * _dense(residual(target, draft))
    assert np.allclose(written, p, rtol=0, atol=1e-12)


@given(laws())
def test_where_target_and_draft_agree_the_residual_is_the_target(target):
    assert np.array_equal(_dense(residual(target, target)), _dense(target))


def _dense(law_: Distribution) -> np.ndarray:
    return probabilities(law_, 1_000)


@given(laws())
def test_the_probability_of_a_token_is_its_place_in_all_probabilities(law_):
    every = _dense(law_)
    assert math.isclose(every.sum(), 1)
    for token in range(0, 1_000, 7):
        assert probability(token, law_) == every[token]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_probabilities_are_the_log_softmax_of_the_raw_logits(dtype):
    logits = rows(49_152, dtype, seed=2)
    expected = torch.log_softmax(logits.double(), -1)
    for token in (0, 17, int(logits.float().argmax())):
        assert math.isclose(log_probability(logits, token), expected[token].item(), rel_tol=1e-6)


@pytest.mark.parametrize("vocab", [40, 5000])
def test_of_equally_likely_tokens_those_of_lower_ids_are_listed(vocab):
    """bfloat16 has few logits, so that ties are common; which of them a partition keeps depends on the processor."""
    logits = torch.from_numpy(np.random.default_rng(vocab).integers(0, 4, vocab)).to(torch.bfloat16)
    order = sorted(range(vocab), key=lambda token: (-float(logits[token]), token))
    for count in (1, 7, 20, vocab):
        own, likeliest = log_probabilities(logits, 3, count)
        assert [token for token, _ in likeliest] == order[:count]
        assert likeliest == [(token, log_probability(logits, token)) for token in order[:count]]
        assert own == log_probability(logits, 3)
