"""Drafters of DFlash's family compute what their weights say: windows and causal blocks, heads after the layers."""

import json

import numpy as np
import pytest
import torch
from reference_dflash import TOKENS, WINDOWS, PlainBlock, block_drafter
from reference_eagle import LLAMA3, YARN
from safetensors.torch import load_file, save_file
from test_ptp import question, states

from quantised_models import CASES, write_quantised
from saltus.engine.target_drafters import load_drafter_for_target
from saltus.methods.published.dflash_files import load_dflash
from saltus.methods.shared.draft_tree import Likeliest, likely_paths
from saltus.models.causal import CausalNetwork
from tiny_models import tiny_llama

CUT = {"draft_vocab_size": len(TOKENS)}
NEMOTRON = {
    "attention_sink_bias": True, "causal": True, "enable_confidence_head": False,
}  # fmt: skip
LFM2 = {"architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False}
VARIANTS = {  # kind, settings of layers, other settings; causal and window of each layer
    "windows": ("dflash", WINDOWS, {}, (True, False), (6, None)),
    "windows, both ways": ("dflash", WINDOWS, {"causal": False}, (False, False), (6, None)),
    "use_swa": ("dflash", {}, {"use_swa": True, "swa_window_size": 6}, (False, False), (6, 6)),
    "JetSpec": ("dflash", {}, {"causal_head": True}, (True, True), (None, None)),
    "causal windows": ("dflash", WINDOWS, {"causal": True}, (True, True), (6, None)),
    "yarn": ("dflash", {"rope_scaling": YARN}, {}, (False, False), (None, None)),
    "llama3": ("dflash", {"rope_scaling": LLAMA3}, {"sample_from_anchor": True}, (False, False), (None, None)),
    "DSpark": ("dspark", {}, {}, (False, False), (None, None)),
    "DSpark, gated": ("dspark", {}, {"markov_head_type": "gated"}, (False, False), (None, None)),
    "DSpark, cut": ("dspark", {}, CUT, (False, False), (None, None)),
    "DSpark of Nemotron 3.5": ("dspark", WINDOWS | {"dspark_bonus_anchor": True}, NEMOTRON, (True, True), (6, None)),
    "DSpark of LFM2.5": ("dspark", LFM2, {"confidence_head_with_markov": None}, (False, False), (None, None)),
    "sinks": ("dflash", {}, {"attention_sink_bias": True}, (False, False), (None, None)),
    "DFlash 2": ("dflash2", WINDOWS | {"is_causal": False}, {}, (False, False), (6, None)),
    "DFlash 2, full": ("dflash2", {}, {"block_size": 4}, (False, False), (None, None)),
    "XPress": ("xpress", {}, {}, (False, False), (None, None)),
    "XPress, cut": ("xpress", {}, CUT, (False, False), (None, None)),
    "XPress, cut, from the anchor": ("xpress", {}, CUT | {"sample_from_anchor": True}, (False, False), (None, None)),
    "Domino": ("domino", {}, {"shift_label": True}, (False, False), (None, None)),
    "Domino, long prefix": ("domino", WINDOWS, {"pure_draft_prefix_len": 3}, (True, False), (6, None)),
    "Domino, cut": ("domino", {}, CUT, (False, False), (None, None)),
}


def asked(tmp_path, variant):
    kind, layers, changes, causal, window = VARIANTS[variant]
    weights, config = block_drafter(tmp_path, kind, layers, **changes)
    target = CausalNetwork(tiny_llama(num_hidden_layers=4))
    network = load_drafter_for_target(f"drafter:{tmp_path}", target, "tiny")
    assert target.hidden_state_layers == (1, 3)
    text, kv_cache = np.random.default_rng(0).integers(5, 250, 20), network.new_kv_cache()
    hidden = states(target, text)[:-1]
    network.forward([question(text[:9], hidden[:8], (0.1,) * 4)], [kv_cache])
    outputs = network.forward([question(text, hidden[8:], (0.1,) * 8)], [kv_cache])[0]
    plain = PlainBlock(weights, config, target.model.get_input_embeddings().weight.detach(), causal, window)
    return plain, outputs, hidden[:, :64], int(text[-1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_published_drafter_computes_what_its_weights_say(tmp_path, variant):
    plain, outputs, hidden, last = asked(tmp_path, variant)
    from_anchor = ("llama3", "XPress, cut, from the anchor", "Domino", "Domino, cut")
    anchor = variant in from_anchor or (variant.startswith("DSpark") and "Nemotron" not in variant)
    block = 4 if variant == "DFlash 2, full" else 5
    logits, last_states = plain.block(hidden, last, block - 1)
    first = 0 if anchor else 1
    all_states, expected, last_states = last_states, logits[first:], last_states[first:]
    predictions, path = outputs.predictions, [11, last]
    order = TOKENS.argsort() if "cut" in variant else torch.arange(300)
    assert len(outputs.logits) == 1 + len(expected)
    torch.testing.assert_close(outputs.logits[1:], expected[:, order].float(), rtol=1e-4, atol=2e-3)
    for position in range(len(expected)):
        left = 60 + position if position else last
        row = expected[position]
        kept = range(len(row))
        if variant.startswith("DSpark"):
            row = row + plain.pair_bias(last_states[position], left)
            assert (predictions.confidence is None) == ("Nemotron" in variant)
            if predictions.confidence is not None:
                found = predictions.confidence(position, left)
                assert found == pytest.approx(float(plain.confidence(last_states[position], left)), abs=1e-3)
        if variant.startswith("DFlash 2"):
            kept = set(row.topk(5).indices.tolist())
            row = row + plain.pair_score(last_states[position], left)
        path = [*path, left] if position else path
        if variant.startswith("XPress"):
            row = row + plain.refinement(all_states, path[1:] if anchor else path)
        if variant.startswith("Domino") and position >= (3 if "long" in variant else 1):
            row = row + plain.prefix_bias(last_states[position], path[1:])
        ids, values, _ = predictions.candidates(position, path)
        columns = [TOKENS.tolist().index(each) for each in ids] if "cut" in variant else ids
        if variant.startswith(("XPress", "Domino")):  # of the tokens that are likely before
            kept = set(columns)
            assert kept >= set(expected[position].topk(3).indices.tolist())
        best = max(kept, key=lambda column: float(row[column]))
        assert list(columns)[int(values.argmax())] == best
        assert not variant.startswith("DFlash 2") or set(columns) == kept
        wanted = row[list(columns)] - row[best]
        np.testing.assert_allclose(values - values.max(), wanted.numpy(), rtol=1e-3, atol=5e-3)


def test_in_a_text_of_one_token_the_token_before_it_is_itself(tmp_path):
    _, outputs, _, last = asked(tmp_path, "XPress")
    predictions = outputs.predictions
    found, expected = (predictions.candidates(1, path)[1] for path in ([last, 60], [last, last, 60]))
    assert np.array_equal(found, expected)
    assert not np.array_equal(found, predictions.candidates(1, [11, last, 60])[1])


@pytest.mark.parametrize("variant", ["windows", "DSpark, gated", "DFlash 2", "XPress", "Domino"])
def test_each_text_of_a_batch_has_the_bits_that_it_has_alone(tmp_path, variant):
    kind, layers, changes, _, _ = VARIANTS[variant]
    block_drafter(tmp_path, kind, layers, **changes)
    target = CausalNetwork(tiny_llama(num_hidden_layers=4))
    network, random = load_drafter_for_target(f"drafter:{tmp_path}", target, "tiny"), np.random.default_rng(3)
    texts = [random.integers(5, 250, length) for length in (8, 45, 300)]
    questions = [question(text, states(target, text)[:-1], (0.5,) * 4) for text in texts]
    alone = [network.forward([each], [network.new_kv_cache()])[0] for each in questions]
    together = network.forward(questions, [network.new_kv_cache() for _ in texts])
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.logits, other.logits)
        assert torch.equal(one.hidden_states, other.hidden_states)


def test_a_confidence_by_the_state_alone_is_known_by_its_size(tmp_path):
    block_drafter(tmp_path, "dspark", confidence_head_with_markov=None)
    weights = load_file(tmp_path / "model.safetensors")
    weight = weights["confidence_head.proj.weight"][:, :32].contiguous()
    save_file(weights | {"confidence_head.proj.weight": weight}, tmp_path / "model.safetensors")
    network = load_drafter_for_target(f"drafter:{tmp_path}", CausalNetwork(tiny_llama(num_hidden_layers=4)), "tiny")
    assert network.predictor.numbers["proj"].shape == (1, 32)


def test_confidence_is_the_chance_of_the_first_token(tmp_path):
    _, outputs, _, last = asked(tmp_path, "DSpark")
    predictions = outputs.predictions
    branches = likely_paths(predictions, [11, last], Likeliest(3), "ptp")
    starts = {branch.tokens[0]: branch.acceptance_probabilities[0] for branch in branches}
    ids = [token for token, _ in Likeliest(3)(predictions, 0, [11, last])]
    confidence = predictions.confidence(0, last)
    if ids[0] in starts:
        assert starts[ids[0]] == pytest.approx(confidence)
    assert all(chance <= 1 - confidence + 1e-9 for token, chance in starts.items() if token != ids[0])
    assert starts


def test_a_drafter_may_read_the_states_after_the_last_layer(tmp_path):
    """Those before the last norm, as NVIDIA's drafter of Nemotron 3.5 does."""
    block_drafter(tmp_path, "dspark", target_layer_ids=[0, 3])
    target = CausalNetwork(tiny_llama(num_hidden_layers=4))
    network = load_drafter_for_target(f"drafter:{tmp_path}", target, "tiny")
    assert target.hidden_state_layers == (1, 4)
    text = np.random.default_rng(0).integers(5, 250, 20)
    hidden = states(target, text)[:-1]
    found = network.forward([question(text, hidden, (0.1,) * 4)], [network.new_kv_cache()])[0]
    weights, config = block_drafter(tmp_path / "again", "dspark", target_layer_ids=[0, 3])
    plain = PlainBlock(weights, config, target.model.get_input_embeddings().weight.detach())
    expected, _ = plain.block(hidden[:, :64], int(text[-1]), 4)
    torch.testing.assert_close(found.logits[1:], expected[: len(found.logits) - 1].float(), rtol=1e-4, atol=2e-3)


def test_sinks_are_not_trained(tmp_path):
    block_drafter(tmp_path, "dflash", attention_sink_bias=True)
    with pytest.raises(ValueError, match="attention sinks, which only the compiled kernels") as error:
        load_dflash(tmp_path, tiny_llama(num_hidden_layers=4), "tiny", trainable=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("case", ["modelopt nvfp4", "fp8"])
def test_quantised_drafters_have_the_numbers_that_their_tensors_stand_for(tmp_path, case):
    settings, writer, _ = CASES[case]
    block_drafter(tmp_path / "drafter", "dspark")
    write_quantised(tmp_path / "drafter", settings, writer, tmp_path / "meant", lambda name: "mlp" in name)
    target = CausalNetwork(tiny_llama(num_hidden_layers=4))
    found, meant = (
        dict(load_drafter_for_target(f"drafter:{tmp_path / each}", target, "tiny").model.named_parameters())
        for each in ("drafter", "meant")
    )
    assert found.keys() == meant.keys()
    assert all(torch.equal(weight, meant[name]) for name, weight in found.items())


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("dspark", {"markov_head_type": "rnn"}, "the head rnn for pairs of tokens"),
        ("dspark", {"enable_confidence_head": False}, "an unknown weight confidence_head.proj.bias"),
        ("dspark", {"attention_mode": "mla"}, "attention of the kind mla"),
        ("dflash2", {"conv_group_size": 5}, "groups of 5 do not divide 32"),
        ("dflash2", {"selector_rank": 7}, r"weight is \(6, 32\), but must be \(7, 32\)"),
        ("dflash2", {"conv_kernel_size": None}, "conv_kernel_size is None"),
        ("dflash", {"attention_sink_bias": True}, "lacks layers.0.self_attn.attention_sink_bias"),
        ("xpress", {"xpress_rank": 7}, r"weight is \(6, 32\), but must be \(7, 32\)"),
        ("xpress", {"block_size": 4}, r"mix.L is \(6, 5, 5\), but must be \(6, 4, 4\)"),
        ("dflash", {"target_layer_ids": []}, "no layers of its target to read"),
        ("dflash", {"use_gemma_norm": True}, "norms of Gemma"),
        (
            "dflash",
            {"projector_type": "lilicorr"},
            r"no drafter that Saltus knows \('lilicorr'\); the forms are dflash, ",
        ),
        ("domino", {"gru_hidden_dim": 4}, r"embed_proj.0.weight is \(6, 42\), but must be \(6, 36\)"),
        ("domino", {"emb_dim": None}, "emb_dim is None"),
        ("domino", {"pure_draft_prefix_len": "1"}, "pure_draft_prefix_len is '1'"),
        ("domino", {"pure_draft_prefix_len": -1}, "pure_draft_prefix_len is -1"),
    ],
)
def test_what_is_not_computed_is_refused_in_a_line(tmp_path, kind, changes, said):
    block_drafter(tmp_path, kind, **{name: value for name, value in changes.items() if name == "projector_type"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["dflash_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = CausalNetwork(tiny_llama(num_hidden_layers=4))
    with pytest.raises(ValueError, match=said) as error:
        load_drafter_for_target(f"drafter:{tmp_path}", target, "tiny")
    assert "\n" not in str(error.value)
