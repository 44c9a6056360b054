"""The compiled kernels of a step give what their definitions in Python give, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saltus.core.canvas import Canvas, continuation
from saltus.core.control.acceptance import Acceptance
from saltus.core.control.call_cost import CallCost
from saltus.core.control.controller import Controller
from saltus.core.distributions import TargetDistributions
from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.core.native_tree import best_size, grow_natively, tree_rows
from saltus.core.native_walk import followed_tokens
from saltus.core.noise import Noise
from saltus.core.rules import match
from saltus.core.sampling import Sampling
from saltus.core.tree import Branch, DraftNodes, each_branch, first_tokens, grow_tree
from saltus.kernels import native
from saltus.models.cpu.attention import ancestor_mask

pytestmark = pytest.mark.skipif(native.load_kernels() is None, reason="needs the compiled kernels")

chances = st.floats(0, 1) | st.sampled_from([0.0, 0.3, 1 / 3, 0.5, 2 / 3, 0.9, 1.0])
seeds = st.integers(0, 2**32 - 1)


@st.composite
def draft_nodes(draw) -> DraftNodes:
    count = draw(st.integers(1, 12))
    parents = [draw(st.integers(-1, node - 1)) for node in range(count)]
    tokens = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    stated = draw(st.lists(chances, min_size=count, max_size=count))
    source = draw(st.sampled_from(["lookup", "lookup/remembered", "ptp"]))
    return DraftNodes(np.array(tokens), np.array(parents), np.array(stated, dtype=np.float64), source)


@settings(deadline=None)
@given(
    st.lists(draft_nodes(), max_size=4),
    st.integers(0, 20),
    st.integers(0, 8),
    st.none() | st.dictionaries(st.tuples(st.sampled_from(["lookup", "ptp"]), st.integers(0, 2)),
                                st.tuples(st.floats(0, 400), st.floats(0, 400))),
    st.sampled_from([0.0, 0.02, 0.3]),
)  # fmt: skip
def test_a_tree_is_that_of_the_definition(drafts, most, max_depth, records, least):
    acceptance = Acceptance(counts=records or {})
    calibrate = () if records is None else (acceptance.calibrated_probability,)
    expected = grow_tree(drafts, most, max_depth, *calibrate, min_expected_tokens=least)
    assert grow_natively(drafts, most, max_depth, records, acceptance.prior, least) == expected


def test_drafts_of_other_kinds_are_left_to_the_definition():
    nodes = DraftNodes(np.array([4, 5, 6]), np.array([-1, 0, -1]), np.array([0.9, 0.8, 0.1]), "a")
    drafts = [nodes, Branch([7, 8], [0.5, 0.5], "b")]
    assert grow_natively(drafts, 8, 8, None, 5.0, 0.0) is None
    assert each_branch(drafts) == [Branch([4, 5], [0.9, 0.8], "a"), Branch([6], [0.1], "a"), drafts[1]]
    assert first_tokens(drafts) == {4, 6, 7}
    assert Controller(adaptive=False).offered_tree(drafts, 8) == grow_tree(drafts, 16, 8)


@given(
    st.dictionaries(st.integers(1, 64), st.floats(0.001, 10), max_size=8),
    st.lists(st.floats(0, 1), min_size=1, max_size=40),
)
def test_the_best_size_is_that_of_the_definition(seconds, expected):
    cost = CallCost(seconds)
    best, best_rate, total = 0, 1 / cost.seconds_for(1), 1.0
    for n, value in enumerate(expected, start=1):
        total += value
        if total / cost.seconds_for(n + 1) > best_rate:
            best, best_rate = n, total / cost.seconds_for(n + 1)
    assert best_size(seconds, expected) == best


@given(st.integers(1, 5), st.integers(0, 50), st.data())
def test_rows_stand_where_they_should_and_see_what_they_may(decided: int, past: int, data):
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(data.draw(st.integers(0, 9)))]
    found = tree_rows(parents, decided, past)
    assert found is not None
    inputs = ForwardInputs(continuation([1], 20), (0,) * len(parents), tuple(parents))
    assert found[0].tolist() == [*range(past, past + decided), *(past + decided + depth for depth in inputs.depths)]
    assert (found[1][:decided] == np.tri(decided, decided + len(parents), dtype=np.uint8)).all()
    assert (found[1][decided:, :decided] == 1).all()
    assert (found[1][decided:, decided:] == ancestor_mask(parents)).all()


@settings(deadline=None)
@given(
    seeds, st.sampled_from([0.0, 0.7, 1.0]), st.sampled_from([torch.bfloat16, torch.float32]), st.booleans(),
    st.sampled_from([1, 3, 9, 600]), st.sampled_from([0, 505]),
)  # fmt: skip
def test_the_walk_decides_what_match_decides(seed, temperature, dtype, broken, holes, start):
    """Where the kernel cannot tell, as for logits that are not finite, the definition goes on from there.

    An error ends the walk before it; the next call, whose first node is that one, ends with it.
    """
    random = np.random.default_rng(seed)
    nodes = int(random.integers(0, 12))
    parents = tuple(int(random.integers(-1, node)) if node else -1 for node in range(nodes))
    tokens = tuple(random.integers(0, 2, nodes).tolist())
    canvas = continuation(np.ones(start + 1), holes)
    if random.random() < 0.3:  # holes in any order
        canvas = Canvas(canvas.tokens, random.permutation(canvas.order), int(random.integers(0, holes)))
    inputs = ForwardInputs(canvas, tokens, parents)
    logits = torch.from_numpy(random.normal(0, 1, (1 + nodes, 40))).to(dtype)
    logits[:, :2] += 3
    if broken:
        logits[int(random.integers(0, 1 + nodes)), 0] = torch.inf
    outputs, sampling = ForwardOutputs(logits), Sampling(temperature)
    if random.random() < 0.5:  # the holes are two, which the model ends itself, and it may not write some tokens
        end, middle = int(random.integers(0, 2)), holes // 2
        ends = ((end, 0, middle), (end, min(middle + 1, holes - 1), holes - 1))
        sampling = replace(sampling, banned=(7, 90, 1 - end)[: 2 + seed % 2], hole_end_tokens=ends)
    distributions = TargetDistributions(inputs, outputs, sampling, Noise(seed))
    node, expected = -1, []
    try:
        for _ in canvas.open_positions:
            expected.append(distributions.pick(node))
            children = [child for child in inputs.children(node) if tokens[child] == expected[-1]]
            if not children:
                break
            node = children[0]
            if distributions.ends_hole(expected):
                break
    except ValueError as error:
        if expected:
            found = match(inputs, TargetDistributions(inputs, outputs, sampling, Noise(seed)))
            assert (found[0].tolist(), found[1]) == (expected, inputs.parents[node])
            return
        with pytest.raises(ValueError, match=str(error)[:20]):
            match(inputs, TargetDistributions(inputs, outputs, sampling, Noise(seed)))
        return
    found = match(inputs, TargetDistributions(inputs, outputs, sampling, Noise(seed)))
    assert (found[0].tolist(), found[1]) == (expected, node)
    assert found[0].dtype == np.int64
    followed, _, is_complete = followed_tokens(distributions)
    assert followed == expected[: len(followed)]
    at_end = bool(followed) and followed[-1] in sampling.hole_end_ids  # in the last place of its hole: the next is open
    assert is_complete or broken or at_end


def test_a_walk_is_left_to_the_definition_where_more_than_logits_decides():
    inputs = ForwardInputs(continuation([1], 3), (2,), (-1,))
    outputs = ForwardOutputs(torch.zeros(2, 8))
    for sampling in (Sampling(logit_bias=((0, 1.0),)), Sampling(1.0, top_k=2), Sampling(1.0, coupling="probability")):
        assert followed_tokens(TargetDistributions(inputs, outputs, sampling, Noise(0))) == ([], -1, False)
