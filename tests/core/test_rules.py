"""The two rules: `match` against a brute-force walk, `reject` against laws worked out by hand."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saltus.core.canvas import continuation
from saltus.core.coupling import pick_token
from saltus.core.distributions import TargetDistributions
from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.core.noise import Noise
from saltus.core.picking import Distribution, probabilities
from saltus.core.rules import match, reject
from saltus.core.sampling import Sampling
from saltus.testing import recording_noise, toy_decoding, toy_network

VOCAB = 4
SAMPLED = Sampling(temperature=1.0)
trees = st.lists(st.tuples(st.integers(0, VOCAB - 1), st.integers(-1, 20)), max_size=12)


def forward(edges, holes: int) -> ForwardInputs:
    """A tree from (token, parent) pairs: parents that come too late are clipped, twins and too deep nodes left out."""
    tokens, parents, depths = [], [], []
    for token, parent in edges:
        parent = min(parent, len(tokens) - 1)
        depth = depths[parent] + 1 if parent >= 0 else 0
        if depth < holes - 1 and (token, parent) not in zip(tokens, parents, strict=True):
            tokens.append(token), parents.append(parent), depths.append(depth)
    return ForwardInputs(continuation([1, 2], holes), tuple(tokens), tuple(parents))


@given(trees, st.integers(1, 8), st.integers(0, 50), st.sampled_from([Sampling(), SAMPLED]))
def test_match_accepts_the_longest_path_that_is_the_text(edges, holes: int, seed: int, sampling: Sampling):
    """Brute force: among all nodes whose path is a prefix of what plain decoding writes, the deepest."""
    target, inputs = toy_network(vocab=VOCAB, logit_scale=1.0), forward(edges, holes)
    text = toy_decoding(
        "plain", [1, 2], holes, target=toy_network(vocab=VOCAB, logit_scale=1.0), seed=seed, sampling=sampling
    ).run()
    distributions = TargetDistributions(
        inputs, target.forward([inputs], [target.new_kv_cache()])[0], sampling, Noise(seed)
    )
    tokens, node = match(inputs, distributions)
    right = [
        inputs.path_tokens(i)
        for i in range(len(inputs.tokens))
        if inputs.path_tokens(i) == text.tokens[: inputs.depths[i] + 1]
    ]
    longest = max(map(len, right), default=0)
    assert tokens.tolist() == text.tokens[: longest + 1]
    assert inputs.path_tokens(node) == tokens.tolist()[:-1]


def law(*weights: float) -> Distribution:
    return Distribution(None, np.array(weights, dtype=np.float64))


def outcome(target: Distribution, drafts: list[tuple[int, Distribution | None]], steps: int = 2000) -> np.ndarray:
    """The frequencies of the first token that `reject` decides: of one hole, with given drafts."""
    logits = torch.from_numpy(np.log(np.maximum(probabilities(target, VOCAB), 1e-300)))[None].repeat(len(drafts) + 1, 1)
    counts = np.zeros(VOCAB)
    inputs = ForwardInputs(
        continuation([1, 2], 2),
        tuple(token for token, _ in drafts),
        (-1,) * len(drafts),
        draft_distributions=tuple(draft for _, draft in drafts),
    )
    for seed in range(steps):
        tokens, _ = reject(inputs, TargetDistributions(inputs, ForwardOutputs(logits), SAMPLED, Noise(seed)))
        counts[tokens[0]] += 1
    return counts / steps


@pytest.mark.slow
def test_a_draft_is_accepted_with_the_ratio_of_the_laws():
    """P = (.1, .4, .5, 0), Q = (.4, .6, 0, 0), drawn 0: accepted with 1/4, else all of (P − Q)₊ is token 2."""
    found = outcome(law(0.1, 0.4, 0.5, 0.0), [(0, law(0.4, 0.6, 0.0, 0.0))])
    assert found == pytest.approx([0.25, 0, 0.75, 0], abs=5 * math.sqrt(0.25 * 0.75 / 2000))


def test_a_draft_as_likely_as_the_target_says_is_always_accepted():
    same = law(0.1, 0.2, 0.3, 0.4)
    for token in range(VOCAB):
        assert outcome(same, [(token, same)], 200)[token] == 1


def test_a_token_without_probability_is_never_accepted():
    found = outcome(law(0.5, 0.5, 0.0, 0.0), [(2, law(0.0, 0.0, 1.0, 0.0)), (3, None)], 500)
    assert found[2:].sum() == 0

    class Zero(Noise):
        def uniform(self, stream, position):
            return 0.0

    inputs = ForwardInputs(continuation([1, 2], 2), (2,), (-1,))
    outputs = ForwardOutputs(torch.tensor([[0.0, 0.0, -math.inf, 0.0]] * 2))
    assert reject(inputs, TargetDistributions(inputs, outputs, SAMPLED, Zero(0)))[0].tolist() == [0]


@pytest.mark.slow
def test_a_chosen_token_is_accepted_with_its_probability_and_a_twin_never_after_it():
    target = law(0.3, 0.2, 0.1, 0.4)
    found = outcome(target, [(1, None), (1, None)])
    assert found == pytest.approx([0.3, 0.2, 0.1, 0.4], abs=5 * math.sqrt(0.25 / 2000))


@pytest.mark.slow
def test_siblings_are_judged_by_what_the_ones_before_left_over():
    """Two draws from Q, enumerated: with its laws told, the first token has law P whatever was drawn."""
    target, draft = law(0.5, 0.3, 0.1, 0.1), law(0.1, 0.2, 0.3, 0.4)
    p, q = (probabilities(one, VOCAB) for one in (target, draft))
    mixed = sum(
        q[a] * q[b] * outcome(target, [(a, draft), (b, draft)], 200) for a in range(VOCAB) for b in range(VOCAB)
    )
    assert mixed == pytest.approx(p, abs=0.05)


def test_rejecting_goes_on_with_the_residual_exactly():
    """In fractions: min(P, Q) + (1 − Σ min(P, Q)) · (P − Q)₊ / Σ (P − Q)₊ = P."""
    p = [Fraction(5, 10), Fraction(3, 10), Fraction(2, 10)]
    q = [Fraction(1, 10), Fraction(6, 10), Fraction(3, 10)]
    accepted = [min(a, b) for a, b in zip(p, q, strict=True)]
    excess = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
    total = [a + (1 - sum(accepted)) * e / sum(excess) for a, e in zip(accepted, excess, strict=True)]
    assert total == p


def test_every_draw_of_a_rule_has_a_stream_and_a_position_of_its_own():
    """Were one used twice, decisions would depend on each other."""
    used: list[tuple[str, int]] = []
    target, streams = toy_network(vocab=VOCAB, logit_scale=2.0), set()
    for seed in range(60):
        used.clear()
        first, second = seed % 4, seed // 4 % 4
        drafted = (law(1.0, 1.0, 1.0, 1.0),) * 4
        inputs = ForwardInputs(
            continuation([1, 2], 4), (first, second, 0, 3), (-1, -1, 0, 1), draft_distributions=drafted
        )
        reject(
            inputs,
            TargetDistributions(
                inputs, target.forward([inputs], [target.new_kv_cache()])[0], SAMPLED, recording_noise(used)(seed)
            ),
        )
        assert len(set(used)) == len(used) > 0
        streams |= {stream for stream, _ in used}
    assert streams == {"text", "accept/0", "accept/1"}


def test_greedy_reject_and_greedy_match_agree():
    for seed in range(20):
        edges = [(int(token), int(parent)) for token, parent in np.random.default_rng(seed).integers(0, 4, (8, 2))]
        inputs, target = forward(edges, 6), toy_network(vocab=VOCAB)
        distributions = TargetDistributions(
            inputs, target.forward([inputs], [target.new_kv_cache()])[0], Sampling(), Noise(0)
        )
        assert match(inputs, distributions)[0].tolist() == reject(inputs, distributions)[0].tolist()


def test_the_last_hole_is_decided_and_no_more():
    target = toy_network(vocab=VOCAB)
    for rule in (match, reject):
        inputs = ForwardInputs(continuation([1, 2], 1))
        tokens, node = rule(
            inputs, TargetDistributions(inputs, target.forward([inputs], [target.new_kv_cache()])[0], SAMPLED, Noise(0))
        )
        assert (len(tokens), node) == (1, -1)
        law = TargetDistributions(inputs, ForwardOutputs(target.logits[1, 2][None]), SAMPLED, Noise(0))[-1]
        assert tokens[0] == pick_token(law, Noise(0), "text", 2)
