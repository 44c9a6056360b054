"""Drafts by auxiliary queries: they never change a text, and who reads the uniforms right writes the most per call."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from test_gated_lora import adapter_for, each_start

from architectures import tiny
from saltus.core.batch import SequenceState, run_batch
from saltus.core.canvas import continuation
from saltus.core.control.call_cost import CallCost
from saltus.core.control.controller import Controller
from saltus.core.distributions import TargetDistributions
from saltus.core.forward import NO_TOKEN, ForwardInputs, ForwardOutputs, NodeKind
from saltus.core.noise import Noise
from saltus.core.picking import pick, probabilities, uniform_interval
from saltus.core.rules import match, reject
from saltus.core.sampling import Sampling, token_distribution
from saltus.core.speculate import speculate
from saltus.evaluation.benchmarks.call_recorder import CallRecorder, tokens_decided_by_call, verification_problems
from saltus.methods.ptp.drafter import AdapterPtp, Ptp
from saltus.methods.ptp.fused_drafter import FusedPtpDrafter, concave_steps, path_end_probabilities, query_chain_lengths
from saltus.methods.shared import query_chains
from saltus.methods.shared.query_chains import (
    most_central,
    offset,
    query_uniforms,
    two_call_drafter,
    with_query_chains,
    with_token_queries,
)
from saltus.models.causal import CausalNetwork
from saltus.testing import ToyNetwork, perfect_adapter, random_adapter, text_probabilities, toy_network
from sampled_laws import keeps_law

PROMPT = [1, 2, 3, 4, 1, 2]
BY_UNIFORM = Sampling(temperature=1.0, coupling="probability")  # a coupling whose queries can be told uniforms
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": BY_UNIFORM,
    "top_k and top_p": Sampling(temperature=0.7, top_k=5, top_p=0.9, coupling="token-order"),
    "greedy, penalised": Sampling(repetition_penalty=1.3),
    "penalised, banned and forced": Sampling(
        0.8, repetition_penalty=1.2, banned=(3,), forced_at_index=((0, 5), (4, 1), (5, 1)), coupling="probability"
    ),
}
FORMS = ["one-hot", "categorical", "independent"]
every_sampling = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
every_form = pytest.mark.parametrize("form", FORMS)
one_and_two_calls = pytest.mark.parametrize("calls", [1, 2], ids=["one call", "two calls"])
greedy_and_sampled = pytest.mark.parametrize("sampling", [Sampling(), BY_UNIFORM], ids=["greedy", "T=1"])


def drafter(calls: int, noise: Noise, sampling: Sampling, **settings):
    return (
        FusedPtpDrafter(noise, sampling, **settings)
        if calls == 1
        else two_call_drafter(noise, sampling, match, **settings)
    )


def seat(
    count: int, steps: list, sampling=None, seed=0, calls=0, controller=None, stop=None, prompt=PROMPT, **settings
) -> SequenceState:
    """A text about to be written; without calls, by plain decoding."""
    noise, sampling = Noise(seed), sampling or BY_UNIFORM
    drafters = [drafter(calls, noise, sampling, **settings)] if calls else []
    canvas = continuation(prompt, count)
    return SequenceState(speculate(canvas, noise, sampling, drafters, steps.append, match, controller, stop))


def write(target, count: int = 24, **settings) -> list[int]:
    steps: list = []
    for _ in run_batch([seat(count, steps, **settings)], {"target": target}):
        pass
    return [int(token) for step in steps for token in step.tokens]


def learned(form: str, sampling: Sampling, adapted=perfect_adapter, **settings) -> ToyNetwork:
    target = toy_network(**{"logit_scale": 1.5} | settings)
    target.adapter = adapted(target, sampling, form) if adapted is perfect_adapter else adapted(target)
    return target


@every_form
@pytest.mark.parametrize("two_calls", [False, True])
@pytest.mark.parametrize("coupling", ["probability", "token-order", "gumbel"])
def test_an_adapter_drafts_under_any_coupling_and_is_told_uniforms_under_its_own(form, two_calls, coupling):
    sampling, told = Sampling(temperature=1.0, coupling=coupling), []
    target = learned(form, sampling)
    adapter = target.adapter
    target.adapter = lambda before, uniforms: told.extend(uniforms) or adapter(before, uniforms)
    method = AdapterPtp("", 5, two_calls, form, 6, False, "token-order")
    steps: list = []
    generator = speculate(
        continuation(PROMPT, 24), Noise(0), sampling, [method.drafter(Noise(0), sampling, match)], steps.append
    )
    for _ in run_batch([SequenceState(generator)], {"target": target}):
        pass
    assert [int(token) for step in steps for token in step.tokens] == write(target, sampling=sampling)
    informed = coupling == "token-order" and form != "independent"
    assert told
    assert informed == any(not math.isnan(u) for u in told)
    assert len(steps) < (8 if informed and form == "one-hot" else 24)


@one_and_two_calls
def test_independent_prediction_drafts_its_picks_or_its_likeliest_tokens(calls):
    """Both write the text; what they draft differs where the uniforms pick other tokens than the likeliest."""
    sampling, drafted = BY_UNIFORM, {}
    target = learned("independent", sampling)
    for argmax in (False, True):
        steps: list = []
        texts = [seat(24, steps, calls=calls, form="independent", argmax=argmax)]
        for _ in run_batch(texts, {"target": target}):
            pass
        assert [int(token) for step in steps for token in step.tokens] == write(target)
        drafted[argmax] = [step.inputs.tokens for step in steps]
    assert drafted[False] != drafted[True]


# Forward


DRAFT, QUERY = NodeKind.DRAFT_TOKEN, NodeKind.UNIFORM_QUERY


def test_a_query_is_never_taken_for_a_token():
    inputs = with_query_chains(
        ForwardInputs(continuation([1, 2], 9), (3, 4), (-1, 0)), [(-1, [0.1, 0.2]), (1, [0.3])], 1.0
    )
    assert inputs.tokens == (3, 4, NO_TOKEN, NO_TOKEN, NO_TOKEN)
    assert (inputs.num_draft_tokens, list(inputs.query_nodes), inputs.depths) == (2, [2, 3, 4], (0, 1, 0, 1, 2))
    assert inputs.matching_nodes([3, 4, NO_TOKEN]) == [0, 1]
    assert inputs.matching_nodes([NO_TOKEN]) == []
    assert [inputs.children(node) for node in range(-1, 5)] == [[0], [1], [], [], [], []]
    assert (inputs.query_chain(-1), inputs.query_chain(0), inputs.query_chain(1)) == ([2, 3], [], [4])


def test_queries_that_start_from_the_last_token_read_it_and_stand_one_position_earlier():
    """Depths stay as they are, and a guess of Jacobi decoding has a token and a position of its own."""
    tree = ForwardInputs(continuation([1, 2], 9), (3, 4), (-1, 0))
    inputs = with_query_chains(tree, [(-1, [0.1, 0.2]), (1, [0.3])], 1.0)
    tokens, offsets, has_token = inputs.node_rows("last-token")
    assert (tokens, offsets.tolist(), has_token) == ([3, 4, 2, 0, 4], [0, 1, -1, 0, 1], (True, False, True))
    tokens, offsets, has_token = inputs.node_rows()
    assert (tokens, offsets.tolist(), has_token) == ([3, 4, 0, 0, 0], list(inputs.depths), (False, False, False))
    guesses = with_token_queries(tree, [7, 8], 0.0)
    assert guesses.node_rows("last-token").tokens == [3, 4, 7, 8]
    assert guesses.node_rows("last-token").offsets.tolist() == [0, 1, 0, 1]


def test_queries_are_told_no_uniform_where_none_chooses():
    """So that an adapter need not learn that u means nothing at temperature 0; in training it is told none either."""
    greedy = with_query_chains(ForwardInputs(continuation([1, 2], 9), (3,), (-1,)), [(0, [0.1, 0.2])], 0.0)
    assert [math.isnan(u) for u in greedy.uniforms] == [True, True]
    assert greedy.kinds == (NodeKind.DRAFT_TOKEN, NodeKind.MASK_QUERY, NodeKind.MASK_QUERY)


@pytest.mark.parametrize(
    ("tokens", "parents", "kinds", "uniforms"),
    [
        ((3, -1), (-1, 0), (DRAFT, DRAFT), ()), ((-1, 4), (-1, -1), (QUERY, DRAFT), (0.5,)),
        ((3,), (-1,), (DRAFT,) * 2, ()),
        ((3, 4), (-1, 0), (DRAFT, QUERY), (0.5,)), ((3, -1), (-1, 0), (DRAFT, QUERY), ()),
    ],
)  # fmt: skip
def test_a_tree_that_mixes_queries_and_tokens_up_is_refused(tokens, parents, kinds, uniforms):
    with pytest.raises(AssertionError):
        ForwardInputs(continuation([1], 9), tokens, parents, kinds=kinds, uniforms=uniforms)


@every_sampling
def test_the_law_of_a_query_is_for_its_own_place(sampling):
    """Picked with the uniform of that place, and forced where that place is."""
    inputs = with_query_chains(ForwardInputs(continuation(PROMPT, 9), (3, 4), (-1, 0)), [(1, [0.3, 0.4])], 1.0)
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 6)))
    noise = Noise(0)
    distributions = TargetDistributions(inputs, ForwardOutputs(logits), sampling, noise)
    for node, index in ((-1, 0), (0, 1), (1, 2), (2, 2), (3, 3)):
        assert distributions.depth(node) == index
        tokens = np.array([*PROMPT, *inputs.path_tokens(node)])
        one = token_distribution(logits[node + 1], sampling, tokens, index)
        assert np.array_equal(one.weights, distributions[node].weights)
        assert distributions.pick(node) == pick(noise.uniforms("text", inputs.canvas.open_positions[index]).item(), one)


@every_form
@pytest.mark.parametrize("calls", [1, 2])
def test_logits_of_queries_that_are_not_numbers_end_no_text(calls, form):
    target = toy_network()
    for broken in (float("nan"), float("inf"), float("-inf")):
        target.adapter = lambda before, uniforms, broken=broken: torch.full((6,), broken, dtype=torch.float64)
        for sampling in (Sampling(), BY_UNIFORM):
            for controller in (None, Controller()):
                text = write(target, calls=calls, sampling=sampling, form=form, controller=controller)
                assert text == write(toy_network(), sampling=sampling)
    assert target.num_queries


# The same text


@every_sampling
@every_form
@one_and_two_calls
def test_a_random_student_cannot_change_the_text(calls, form, sampling):
    target = learned(form, sampling, random_adapter)
    for seed in range(3):
        plain = write(toy_network(logit_scale=1.5), sampling=sampling, seed=seed)
        assert write(target, calls=calls, sampling=sampling, seed=seed, form=form) == plain
    assert target.num_queries


@every_sampling
@every_form
@one_and_two_calls
def test_a_perfect_student_cannot_change_it_either(calls, form, sampling):
    target = learned(form, Sampling(sampling.temperature, sampling.top_k, sampling.top_p, coupling=sampling.coupling))
    plain = write(toy_network(logit_scale=1.5), sampling=sampling, count=17)
    assert write(target, calls=calls, sampling=sampling, form=form, count=17) == plain


@one_and_two_calls
def test_no_length_and_no_stop_is_overrun(calls):
    target = learned("one-hot", BY_UNIFORM)
    whole = write(toy_network(logit_scale=1.5))
    for length in range(1, 13):
        assert write(target, length, calls=calls) == whole[:length]

    def stop(canvas, tokens):
        ends = np.flatnonzero(tokens == whole[7])
        return int(ends[0]) + 1 if len(ends) else None

    assert write(target, calls=calls, stop=stop) == whole[: whole.index(whole[7]) + 1]


@one_and_two_calls
def test_texts_of_a_batch_are_those_written_alone(calls):
    sampling, target, steps = BY_UNIFORM, learned("one-hot", BY_UNIFORM), [[], [], []]
    sequences = [seat(9 + 5 * seed, steps[seed], sampling, seed, calls) for seed in range(3)]
    for _ in run_batch(sequences, {"target": target}):
        pass
    for seed in range(3):
        assert [token for step in steps[seed] for token in step.tokens] == write(
            toy_network(logit_scale=1.5), 9 + 5 * seed, seed=seed, sampling=sampling
        )


@one_and_two_calls
def test_a_witness_believes_the_calls_and_no_query_vouches_for_a_token(calls):
    witness = CallRecorder(learned("one-hot", BY_UNIFORM))
    tokens = write(witness, calls=calls)
    assert verification_problems(witness.calls, PROMPT, tokens) == []
    assert sum(tokens_decided_by_call(witness.calls, PROMPT, tokens)) == 24
    last = witness.calls[-1]
    unverified = [
        replace(seen, inputs=with_query_chains(ForwardInputs(seen.inputs.canvas), [(-1, [0.5] * 9)], 1.0))
        for seen in [last]
    ]
    assert verification_problems([*witness.calls[:-1], *unverified], PROMPT, tokens)


# Tokens per call


@greedy_and_sampled
@pytest.mark.parametrize("form", ["one-hot", "categorical"])
def test_a_perfect_student_writes_all_drafts_and_one_more_in_two_calls(form, sampling):
    target = learned(form, sampling)
    write(target, 24, calls=2, sampling=sampling, form=form, num_draft_tokens=5)
    assert target.calls == 8


@greedy_and_sampled
@pytest.mark.parametrize("form", ["one-hot", "categorical"])
def test_of_a_student_with_a_network_of_its_own_the_first_query_drafts_too(form, sampling):
    target, student, noise, steps = (
        toy_network(logit_scale=1.5),
        replace(learned(form, sampling), name="ptp"),
        Noise(0),
        [],
    )
    drafter = two_call_drafter(noise, sampling, match, form, num_draft_tokens=5, network_name="ptp")
    seat = SequenceState(speculate(continuation(PROMPT, 24), noise, sampling, [drafter], steps.append))
    for _ in run_batch([seat], {"target": target, "ptp": student}):
        pass
    assert [int(token) for step in steps for token in step.tokens] == write(
        toy_network(logit_scale=1.5), 24, sampling=sampling
    )
    assert (target.calls, student.calls) == (4, 4)


@greedy_and_sampled
@pytest.mark.parametrize("form", ["one-hot", "categorical"])
def test_a_perfect_student_writes_all_drafts_and_one_more_in_every_call(form, sampling):
    target = learned(form, sampling)
    write(target, 25, calls=1, sampling=sampling, form=form, num_draft_tokens=5, max_queries=60)
    assert target.calls == 5  # the first decides one token, the others six


@one_and_two_calls
def test_a_useless_student_costs_no_more_calls_than_tokens(calls):
    target = learned("one-hot", BY_UNIFORM, random_adapter)
    write(target, 24, calls=calls)
    assert target.calls <= 24


@pytest.mark.slow
@one_and_two_calls
def test_who_reads_the_uniforms_beats_who_does_not(calls):
    """The same laws to learn from: the marginals of independent prediction fall behind."""
    counts = {}
    for form in FORMS:
        target = learned(form, BY_UNIFORM)
        for seed in range(3):
            write(target, 30, calls=calls, seed=seed, form=form, num_draft_tokens=6)
        counts[form] = target.calls
    assert counts["categorical"] < counts["independent"] / 1.5
    assert counts["one-hot"] <= counts["categorical"]


@pytest.mark.slow
def test_where_rows_are_dear_only_groups_that_pay_are_asked():
    inputs = {}
    for name, adapted in (("oracle", perfect_adapter), ("fool", random_adapter)):
        target = learned("one-hot", BY_UNIFORM, adapted)
        controller = Controller(call_cost=CallCost({1: 1.0, 16: 3.0}))
        for seed in range(6):
            write(target, 60, calls=1, seed=seed, controller=controller)
        before = target.num_queries, target.calls
        write(target, 60, calls=1, seed=9, controller=controller)
        inputs[name] = target.num_queries - before[0], target.calls - before[1]
    assert inputs["oracle"][1] < 20
    assert inputs["fool"][0] <= 6
    assert inputs["oracle"][0] > 40


@pytest.mark.slow
def test_a_group_that_did_not_pay_is_tried_again():
    target = learned("one-hot", BY_UNIFORM, random_adapter)
    controller = Controller(call_cost=CallCost({1: 1.0, 16: 3.0}))
    write(target, 200, calls=1, controller=controller)
    before = target.num_queries
    target.adapter = perfect_adapter(target, BY_UNIFORM)
    write(target, 900, calls=1, controller=controller)
    assert target.num_queries - before > 200


# Group sizes


def brought(sizes, ends, odds) -> float:
    drafts = np.concatenate([[0.0, 0.0], np.cumsum(np.cumprod(odds))])
    return sum(end * drafts[size] for end, size in zip(ends, sizes, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_group_sizes_bring_nearly_as_many_drafts_as_any(seed):
    dice = np.random.default_rng(seed)
    ends, odds, most = dice.dirichlet([0.7] * 3), dice.uniform(0.2, 0.95, 5).tolist(), 8
    sizes = query_chain_lengths(ends.tolist(), odds, most, [9] * 3, 4, 2.0, lambda rows: 1.0)
    assert sum(sizes) <= most
    assert max(sizes) <= 6
    assert 1 not in sizes
    best = max(brought(each, ends, odds) for each in itertools.product(range(7), repeat=3) if sum(each) <= most)
    assert brought(sizes, ends, odds) >= 0.85 * best
    vertex = sum(width for width, _ in concave_steps(odds)[:1])
    alone = query_chain_lengths(ends.tolist(), odds, vertex, [9] * 3, 4, 2.0, lambda rows: 1.0)
    most_likely = int(ends.argmax())
    assert [place for place, size in enumerate(alone) if size] == [most_likely]


def test_groups_stop_where_holes_or_gains_end():
    def free(rows: int) -> float:
        return 1.0

    assert query_chain_lengths([1.0], [0.9] * 5, 50, [3], 1, 1.0, free) == [4]
    assert query_chain_lengths([1.0], [0.9] * 5, 50, [0], 1, 1.0, free) == [0]
    assert query_chain_lengths([1.0], [0.0] * 5, 50, [9], 1, 1.0, free) == [0]
    assert query_chain_lengths([0.9, 0.1], [0.9] * 5, 50, [9, 9], 2, 2.0, lambda rows: float(rows)) == [0, 0]
    assert query_chain_lengths([0.9, 0.1], [0.9] * 5, 50, [9, 9], 2, 1.0, free) == [6, 6]
    steep = query_chain_lengths([0.9, 0.1], [0.9, 0.9, 0.1], 50, [9, 9], 2, 1.0, lambda rows: 1 + 0.1 * rows)
    assert steep == [3, 0]


def test_a_path_ends_where_its_chances_say():
    inputs = ForwardInputs(continuation([1], 9), (3, 4, 5), (-1, 0, -1))
    ends, reached = path_end_probabilities(inputs, [0.5, 0.4, 0.25])
    assert np.allclose(ends, [0.25, 0.3, 0.2, 0.25])
    assert np.allclose(reached, [1, 0.5, 0.2, 0.25])
    assert np.isclose(sum(ends), 1)


# The paper's theorems, on laws that can be enumerated


@pytest.mark.slow
def test_knowing_the_uniforms_before_is_knowing_the_tokens():
    """Theorem 2: P(t_k | t_<i, u_i…u_k−1) = P(t_k | t_<k). Over a grid of uniforms, and at the ends of intervals."""
    sampling, target = BY_UNIFORM, toy_network(vocab=4, logit_scale=1.5, seed=3)
    student, grid = perfect_adapter(target, sampling, "categorical"), (np.arange(64) + 0.5) / 64
    first = token_distribution(target.logits[1, 2], sampling)
    edges = [edge for token in range(4) for edge in uniform_interval(token, first) if edge < 1]
    for u in [*grid[::4], *edges, *(np.nextafter(edge, 0) for edge in edges if edge)]:
        token = pick(u, first)
        second = token_distribution(target.logits[2, token], sampling)
        for v in grid[::8]:
            third = pick(v, second)
            own = probabilities(token_distribution(target.logits[token, third], sampling), 4)
            told = probabilities(
                token_distribution(student((1, 2), query_uniforms([u, v, 0.5], "categorical")), sampling), 4
            )
            assert np.array_equal(told, own)
            chain = [
                pick(w, token_distribution(target.logits[token, third], sampling)) for w in grid
            ]  # over the last uniform
            assert np.abs(np.bincount(chain, minlength=4) / 64 - own).max() <= 1 / 64


def test_all_uniforms_make_the_text_a_function():
    """Theorem 1: an O-PTP oracle says at once what decoding one by one says."""
    sampling, target = BY_UNIFORM, toy_network(vocab=4, logit_scale=1.5, seed=3)
    student = perfect_adapter(target, sampling)
    for seed in range(20):
        text = write(target, 6, sampling=sampling, seed=seed, prompt=[1, 2])
        uniforms = Noise(seed).uniforms("text", np.arange(2, 8))
        at_once = [int(student((1, 2), uniforms[: k + 1].tolist()).argmax()) for k in range(6)]
        assert at_once == text


# Several drafts


def test_offsets_are_uniform_whatever_the_token():
    one = token_distribution(toy_network(vocab=4).logits[1, 2], BY_UNIFORM)
    uniforms = Noise(0).uniforms("any", np.arange(4000))
    found: dict[int, list[float]] = {}
    for u in uniforms:
        token = pick(float(u), one)
        found.setdefault(token, []).append(offset(float(u), token, one))
    for offsets in found.values():
        assert stats.kstest(offsets, "uniform").pvalue > 1e-3


def test_the_most_central_draft_is_taken():
    assert most_central([[0.5, 0.1], [0.4, 0.6], [0.0, 0.5]]) == 1


def is_law_kept(drafts: int, form: str, to: str = "target") -> bool:
    """By texts of three tokens that several drafts make under `reject`."""
    sampling, target = BY_UNIFORM, toy_network(vocab=3, logit_scale=0.7, seed=5)
    wrong = toy_network(vocab=3, logit_scale=0.7, seed=6)
    networks = {"target": target, "ptp": replace(toy_network(vocab=3, seed=7), name="ptp")}
    networks[to].adapter = perfect_adapter(wrong, sampling, form)

    def write_text(seed: int) -> int:
        steps: list = []
        noise = Noise(seed)
        chosen = two_call_drafter(noise, sampling, reject, form, drafts=drafts, network_name=to)
        generator = speculate(continuation([1, 2], 3), noise, sampling, [chosen], steps.append, reject)
        for _ in run_batch([SequenceState(generator)], networks):
            pass
        return int("".join(str(int(token)) for step in steps for token in step.tokens), 3)

    return keeps_law(write_text, text_probabilities(target, [1, 2], 3, sampling), 1500)


@pytest.mark.unchecked
@pytest.mark.slow
@pytest.mark.parametrize("drafts", [1, 4])
@pytest.mark.parametrize("form", ["categorical", "independent"])
def test_choosing_a_central_draft_leaves_the_law_as_it_is(drafts, form):
    assert is_law_kept(drafts, form)


@pytest.mark.unchecked
@pytest.mark.slow
def test_drafts_of_a_student_leave_the_law_as_it_is():
    assert is_law_kept(1, "categorical", to="ptp")


@pytest.mark.unchecked
@pytest.mark.slow
def test_choosing_by_what_a_draft_says_is_found_out(monkeypatch):
    """The test above has the power to see a bias: here the draft of the smallest ids is taken."""
    monkeypatch.setattr(
        query_chains, "_branch_offsets", lambda uniforms, branch: [0.5 + 0.1 * t for t in branch.tokens]
    )
    assert not is_law_kept(4, "categorical")


@pytest.mark.parametrize("is_student", [False, True])
def test_the_option_drafts_asks_for_as_many_chains(is_student):
    """Of several chains of a call the most central one is verified."""
    method = Ptp(drafts=3, num_draft_tokens=4).for_trained_model(
        "adapter",
        {"form": "categorical", "window": 6, "coupling": "probability", **({"student_of": "x"} if is_student else {})},
    )
    assert method.drafts == 3
    target = learned("categorical", BY_UNIFORM)
    networks = {"target": target, "ptp": replace(toy_network(logit_scale=1.5), name="ptp", adapter=target.adapter)}
    drafted: list[ForwardInputs] = []
    for network in networks.values():
        forward = network.forward
        network.forward = lambda batch, caches, forward=forward: drafted.extend(batch) or forward(batch, caches)
    steps: list = []
    drafter = method.drafter(Noise(0), BY_UNIFORM, reject)
    generator = speculate(continuation(PROMPT, 12), Noise(0), BY_UNIFORM, [drafter], steps.append, reject)
    for _ in run_batch([SequenceState(generator)], networks):
        pass
    calls = [inputs for inputs in drafted if inputs.query_nodes and len(inputs.canvas.open_positions) > 5]
    assert calls
    assert all(list(inputs.parents).count(-1) == 3 for inputs in calls)
    assert all(len(inputs.query_nodes) == 12 for inputs in calls)
    assert sum(len(step.tokens) for step in steps) == 12


def test_several_drafts_where_they_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="drafts is 0, but must be 1 or more"):
        Ptp(drafts=0)
    with pytest.raises(ValueError, match="several drafts need an adapter, but auto is a drafter"):
        Ptp(drafts=2).for_trained_model("drafter", {}).drafter(Noise(0), BY_UNIFORM, reject)
    adapter = Ptp(drafts=2).for_trained_model("adapter", {"form": "categorical", "window": 6})
    with pytest.raises(ValueError, match="several drafts need fresh uniforms"):
        adapter.drafter(Noise(0), BY_UNIFORM, match)
    with pytest.raises(ValueError, match="several drafts need uniforms, which gumbel has not"):
        adapter.drafter(Noise(0), Sampling(temperature=1.0), reject)


@pytest.mark.parametrize(
    ("kind", "training", "coupling", "temperature", "is_said"),
    [
        ("adapter", {"form": "one-hot"}, "gumbel", 0.7, True),
        ("adapter", {"form": "categorical", "coupling": "token-order"}, "probability", 0.7, True),
        ("adapter", {"form": "one-hot"}, "gumbel", 0.0, False),
        ("adapter", {"form": "one-hot"}, "probability", 0.7, False),
        ("adapter", {"form": "independent", "coupling": "gumbel"}, "gumbel", 0.7, False),
        ("drafter", {"recipe": {"drafter": {"reads_uniforms": True}}}, "gumbel", 0.7, True),
        ("drafter", {"recipe": {"drafter": {"reads_uniforms": False}}}, "gumbel", 0.7, False),
        ("drafter", {}, "gumbel", 0.7, False),
    ],
)
def test_a_line_says_once_that_uniforms_are_not_those_of_the_training(
    kind, training, coupling, temperature, is_said, tmp_path, caplog
):
    method = Ptp(model=str(tmp_path)).for_trained_model(kind, training)
    for seed in range(2):
        method.drafter(Noise(seed), Sampling(temperature, coupling=coupling), match)
    said = [record.message for record in caplog.records]
    trained_for = training.get("coupling", "probability")
    cure = f"decode with --coupling {trained_for} (coupling='{trained_for}')"
    assert len(said) == is_said
    assert all(f"the uniforms of the coupling {trained_for}, but gets none under {coupling}" in line for line in said)
    assert all(cure in line for line in said)


def test_what_cannot_be_exact_is_refused():
    with pytest.raises(ValueError, match="needs drafts sampled from distributions"):
        two_call_drafter(Noise(0), Sampling(), reject, "one-hot")
    with pytest.raises(ValueError, match="needs drafts sampled from distributions"):
        two_call_drafter(Noise(0), Sampling(), reject, "independent", argmax=True)
    with pytest.raises(ValueError, match="need fresh uniforms"):
        two_call_drafter(Noise(0), Sampling(), match, drafts=2)


# On a network


@each_start
@greedy_and_sampled
@one_and_two_calls
def test_texts_of_a_batch_with_an_adapter_are_those_of_plain_decoding(calls, sampling, query_start):
    """Whatever the adapter's weights are, and where its queries stand."""
    model = tiny("Qwen2")
    bare, network = CausalNetwork(tiny("Qwen2")), CausalNetwork(model)
    network.attach_adapter(adapter_for(model, query_start=query_start))
    prompts, steps = [[3, 5, 7], [4], [9] * 11], [[], [], []]
    seats = [
        seat(20, written, sampling, calls=calls, prompt=prompt) for prompt, written in zip(prompts, steps, strict=True)
    ]
    for _ in run_batch(seats, {"target": network}):
        pass
    for prompt, written in zip(prompts, steps, strict=True):
        found = [int(token) for step in written for token in step.tokens]
        assert found == write(bare, 20, sampling=sampling, prompt=prompt)
        assert any(step.inputs.tokens for step in written), "something was drafted"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@greedy_and_sampled
@one_and_two_calls
def test_a_models_text_stays_the_same_to_the_token(calls, sampling, dtype):
    model = tiny("Llama").to(dtype)
    bare = CausalNetwork(tiny("Llama").to(dtype))
    network = CausalNetwork(model)
    network.attach_adapter(adapter_for(model))
    for seed in range(2):
        plain = write(bare, 40, sampling=sampling, seed=seed)
        for form in FORMS[:2]:
            assert write(network, 40, calls=calls, sampling=sampling, seed=seed, form=form) == plain
