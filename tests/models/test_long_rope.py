"""LongRoPE: a text's own length decides its angles, and neither its drafts nor the other texts of a call do."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from architectures import random_tree, text, tiny
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.core.sampling import log_probability
from saltus.engine.comparison import logit_gap
from saltus.engine.prefix_tree import supports_prefix_tree
from saltus.engine.prompt_scores import SCORED_ROWS, PromptScores
from saltus.evaluation.benchmarks import loglikelihood
from saltus.evaluation.benchmarks.loglikelihood import score_continuations
from saltus.models.causal import CausalNetwork

BORDER = 24  # tokens of the longest text with the angles of short ones
ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 5.0],
    "original_max_position_embeddings": BORDER, "factor": 8.0,
}  # fmt: skip


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}


@pytest.fixture(scope="module", params=["Llama", "Phi3", "MiniCPM3", "dynamic"])
def network(request):
    if request.param == "dynamic":
        sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
        return CausalNetwork(tiny("Llama", rope_parameters=dict(DYNAMIC), max_position_embeddings=BORDER, **sizes))
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 192}
    more = {"Phi3": {"original_max_position_embeddings": BORDER}, "MiniCPM3": {"num_key_value_heads": 4}}
    return CausalNetwork(tiny(request.param, rope_parameters=dict(ROPE), **sizes | more.get(request.param, {})))


def logits(network, tokens, limit: int, tree=(), kv_cache=None) -> torch.Tensor:
    inputs = ForwardInputs(continuation(tokens, limit - len(tokens)), *tree)
    return network.forward([inputs], [kv_cache or network.new_kv_cache()])[0].logits


@pytest.mark.parametrize(("length", "limit"), [(20, BORDER), (30, 40)])
def test_short_and_long_texts_have_the_logits_of_transformers(network, length, limit):
    tokens = text(length)
    embedding = network.model.model.rotary_emb
    if embedding.rope_type == "dynamic" and limit > BORDER:  # as stretched as the longest text's
        embedding(torch.zeros(1), torch.tensor([[8 * BORDER - 1]]))
        embedding.original_max_seq_len = 0  # else a shorter text has its own again
    expected = network.model(torch.tensor(tokens[None]), use_cache=False).logits[0, -1]
    embedding.original_max_seq_len = BORDER
    assert torch.allclose(logits(network, tokens, limit)[0], expected, atol=1e-4)
    other = BORDER if limit > BORDER else 40
    if length < BORDER:
        assert not torch.allclose(logits(network, tokens, other)[0], expected, atol=1e-3)


@pytest.mark.unchecked
@pytest.mark.parametrize("limit", [BORDER, 40])
def test_the_gap_at_a_flip_is_that_of_the_text_s_own_angles(network, limit):
    """Of a text that may get long the prompt and the tokens so far may be short."""
    tokens, context = text(20), SimpleNamespace(context_length=None if limit == BORDER else 40)
    engine = SimpleNamespace(encode=lambda prompt: prompt, network=network, target=context)
    plain, other = (SimpleNamespace(prompt=tokens[:18].tolist(), tokens=[*tokens[18:], last]) for last in (3, 5))
    row = logits(network, tokens, limit)[0].float()
    gap = logit_gap(engine, plain, other, 2, 6 if limit == BORDER else 500)
    assert gap == pytest.approx(abs(float(row[3] - row[5])), abs=1e-4)


@pytest.mark.parametrize("limit", [BORDER, 40])
def test_a_row_has_the_same_bits_alone_as_a_node_and_beside_texts_of_another_length(network, limit):
    tokens, kv_cache, plain = text(limit), network.new_kv_cache(), []
    for length in range(18, 23):
        plain.append(logits(network, tokens[:length], limit, kv_cache=kv_cache)[0])
    chain = tuple(tokens[18:22].tolist()), tuple(range(-1, 3))
    assert torch.equal(logits(network, tokens[:18], limit, chain), torch.stack(plain))
    batch = [
        ForwardInputs(continuation(text(30, seed=1), 30), *random_tree(7)),
        ForwardInputs(continuation(tokens[:18], limit - 18), *chain),
        ForwardInputs(continuation(text(9, seed=2), 3)),
    ]
    together = network.forward(batch, [network.new_kv_cache() for _ in batch])
    assert torch.equal(together[1].logits, torch.stack(plain))
    assert torch.equal(together[2].logits, network.forward(batch[2:], [network.new_kv_cache()])[0].logits)


def test_keys_of_a_text_are_not_kept_for_one_that_may_get_longer(network):
    assert not supports_prefix_tree(network)


def test_a_cache_that_was_read_as_a_short_text_is_read_again_for_a_long_one(network):
    tokens, kv_cache = text(30), network.new_kv_cache()
    for limit in (BORDER, 40, BORDER):
        length = 20 if limit == BORDER else 30
        found = logits(network, tokens[:length], limit, kv_cache=kv_cache)
        assert torch.equal(found, logits(network, tokens[:length], limit))


def whole_text_scores(network, tokens) -> list[float]:
    """The log-probabilities of all tokens but the first, by one call."""
    chain = tuple(tokens[1:-1].tolist()), tuple(range(-1, len(tokens) - 3))
    rows = logits(network, tokens[:1], len(tokens), chain)
    return [log_probability(row, token) for row, token in zip(rows, tokens[1:].tolist(), strict=True)]


@pytest.mark.parametrize("length", [BORDER, BORDER + 1, 2 * SCORED_ROWS])
def test_scores_of_a_prompt_are_those_of_the_whole_text(network, length):
    tokens = text(length)
    scores, kv_cache = PromptScores(tokens.tolist()), network.new_kv_cache()
    while scores.num_unscored:
        scores.score_chunk(network, kv_cache, length)
    assert scores.log_probabilities == whole_text_scores(network, tokens)


@pytest.mark.parametrize("max_nodes", [24, 6])
def test_the_likelihood_of_a_continuation_is_that_of_its_whole_text(network, monkeypatch, max_nodes):
    monkeypatch.setattr(loglikelihood, "MAX_NODES_PER_CALL", max_nodes)
    monkeypatch.setattr(loglikelihood, "MIN_NODES_PER_TEXT", max_nodes)
    tokens = text(40).tolist()
    pairs = [(tokens[:20], tokens[20:end]) for end in (22, BORDER, BORDER + 1, 40)] + [(tokens[:30], tokens[30:])]
    for (context, more), score in zip(pairs, score_continuations(network, pairs), strict=True):
        expected = whole_text_scores(network, np.array([*context, *more]))[len(context) - 1 :]
        assert score.log_likelihood == pytest.approx(sum(expected), abs=1e-4)
