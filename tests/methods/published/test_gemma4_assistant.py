"""Gemma 4's assistants: their numbers are those of Transformers' class, and the target's keys stay as they were."""

import copy
import json

import numpy as np
import pytest
import torch
from reference_gemma4_assistant import published_assistant, reference_logits
from safetensors.torch import load_file, save_file

import saltus
from architectures import by_our_kernels, tiny
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs, NodeKind
from saltus.engine.target_drafters import load_drafter_for_target
from saltus.models.causal import CausalNetwork
from saltus.models.cuda import gpu_decoder_support
from saltus.models.cuda.described_layers import described_for_gpu
from saltus.models.cuda.fixed_shape_calls import FixedShapeSettings
from saltus.models.protocols import KeepsKeysAndValues
from tiny_models import byte_tokenizer

TARGETS = ["Gemma4", "Gemma4 of shared keys"]
COUNT = 4
CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
BOUND = 0.1 if CUDA else 1e-4
SETTINGS = FixedShapeSettings(page_size=128, pages_per_block=1, prefill_chunk=64, rows_per_group=4)


def target_model(name: str, **changes):
    tokens = {"vocab_size": 300, "vocab_size_per_layer_input": 300, "eos_token_id": 0, "pad_token_id": 1}
    return tiny(name, **tokens, bos_token_id=2, **changes)


def with_queries(text: np.ndarray, states: torch.Tensor, count: int = COUNT) -> ForwardInputs:
    queries = tuple(range(-1, count - 1))
    return ForwardInputs(
        continuation(text, count), (-1,) * count, queries, network_name="ptp", hidden_states=states,
        kinds=(NodeKind.UNIFORM_QUERY,) * count, uniforms=(float("nan"),) * count,
    )  # fmt: skip


def after_a_tree(target: CausalNetwork, seed: int, length: int):
    """A text of which the last call read a tree and accepted two nodes, which are not the first ones; and its cache."""
    tokens = np.random.default_rng(seed).integers(3, 300, length + 3)
    text, accepted, last = tokens[:length], tokens[length : length + 2].tolist(), tokens[-1:]
    cache = target.new_kv_cache()
    tree = (7, accepted[0], 9, accepted[1]), (-1, -1, 1, 1)
    out = target.forward([ForwardInputs(continuation(text, 8), *tree, output_hidden_states=True)], [cache])[0]
    assert out.hidden_states is not None
    return np.concatenate([text, accepted, last]), out.hidden_states[-1:], cache


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_drafts_are_those_of_transformers(name, ordered, tmp_path):
    model = target_model(name)
    changes = {"use_ordered_embeddings": True, "num_centroids": 20, "centroid_intermediate_top_k": 5} if ordered else {}
    assistant = published_assistant(tmp_path, model, **changes)
    target = CausalNetwork(model)
    network = load_drafter_for_target(f"drafter:{tmp_path}", target, "tiny")
    texts, states, caches = zip(*[after_a_tree(target, seed, 9 + 20 * seed) for seed in range(3)], strict=True)
    found = network.forward([with_queries(*each) for each in zip(texts, states, strict=True)], caches)
    for text, out in zip(texts, found, strict=True):
        expected = reference_logits(assistant, model, text.tolist(), COUNT)
        computed = out.logits[1:]
        seen = computed > -1e3
        assert seen.sum() == COUNT * (5 * 15 if ordered else 300)
        torch.testing.assert_close(computed[seen], expected[seen], atol=1e-3, rtol=1e-3)
        assert torch.equal(out.logits[0], out.logits[1])


@pytest.mark.slow
@pytest.mark.parametrize("clusters", [{}, {"num_centroids": 20, "centroid_intermediate_top_k": 5}], ids=["all", "some"])
@torch.inference_mode()
def test_drafts_by_our_kernels_over_the_targets_pages_are_those_over_its_cache(tmp_path, clusters, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(gpu_decoder_support, "KERNEL_DTYPES", {DTYPE})
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 32}
    of_target = {"num_key_value_heads": 1, "hidden_size_per_layer_input": 64, "global_head_dim": 64}
    model = target_model("Gemma4 of shared keys", **sizes, **of_target).to(DTYPE)
    published_assistant(tmp_path, model, **sizes, use_ordered_embeddings=bool(clusters), **clusters)
    ours = by_our_kernels(copy.deepcopy(model).to(DEVICE), described_for_gpu(model), SETTINGS)
    drafts = []
    for target in (CausalNetwork(model, batch_invariant=False), ours):
        network = load_drafter_for_target(f"drafter:{tmp_path}", target, "tiny")
        texts, states, caches = zip(*[after_a_tree(target, *each) for each in ((1, 20), (2, 70))], strict=True)
        inputs = [with_queries(*each) for each in zip(texts, states, (4, 2), strict=True)]
        drafts.append(network.forward(inputs, caches))
    for expected, found in zip(*drafts, strict=True):
        logits = found.logits.float().cpu()
        seen = expected.logits > -1e3
        assert torch.equal(logits > -1e3, seen)
        assert (logits - expected.logits)[seen].norm() < BOUND * expected.logits[seen].norm()


def test_a_draft_call_leaves_the_targets_next_call_as_it_was(tmp_path):
    model = target_model("Gemma4")
    published_assistant(tmp_path, model)
    target = CausalNetwork(model)
    network = load_drafter_for_target(f"drafter:{tmp_path}", target, "tiny")
    logits = []
    for drafts in (False, True):
        text, states, cache = after_a_tree(target, 1, 40)
        if drafts:
            network.forward([with_queries(text, states)], [cache])
        logits.append(target.forward([ForwardInputs(continuation(text, 2), (5,), (-1,))], [cache])[0])
    assert torch.equal(logits[0].logits, logits[1].logits)
    assert logits[0].context_tokens_read == logits[1].context_tokens_read == 1


@pytest.mark.parametrize("name", TARGETS)
def test_texts_are_those_of_plain_decoding(name, tmp_path):
    model = target_model(name)
    model.save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    published_assistant(tmp_path / "assistant", model)
    options = {"ptp": {"model": str(tmp_path / "assistant")}}
    engine = saltus.load(str(tmp_path / "target"), "ptp+lookup", options=options, adaptive=False, max_draft_tokens=8)
    texts = ["the cat", "a dog " * 30]
    for temperature in (0.0, 1.0):
        given = {"max_new_tokens": 24, "temperature": temperature, "ignore_eos": True}
        plain = engine.generate(texts, method="plain", **given)
        for method in ("ptp", "ptp+lookup"):
            found = engine.generate(texts, method=method, **given)
            assert [one.tokens for one in found] == [one.tokens for one in plain]
            assert all(one.statistics.draft_calls for one in found)
        assert engine.generate(texts[1], **given).tokens == plain[1].tokens  # continues a kept prefix


def test_an_assistant_that_does_not_fit_is_refused_in_a_line(tmp_path):
    model = target_model("Gemma4")
    published_assistant(tmp_path, model, use_ordered_embeddings=True, num_centroids=20, centroid_intermediate_top_k=5)
    target, config = CausalNetwork(model), json.loads((tmp_path / "config.json").read_text())
    weights = load_file(tmp_path / "model.safetensors")

    def refused(said: str, on=target, **changed) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config | changed))
        with pytest.raises(ValueError, match=said) as error:
            load_drafter_for_target(f"drafter:{tmp_path}", on, "tiny")
        assert "\n" not in str(error.value)

    refused("key heads 2 × 8 in layer 0", text_config=config["text_config"] | {"head_dim": 8})
    refused("centroids.weight is \\(20, ", num_centroids=7)
    refused("of which 21 are read", centroid_intermediate_top_k=21)
    refused("layers of sliding_attention, and tiny has none", on=CausalNetwork(tiny("Llama", vocab_size=300)))
    on_a_gpu = CausalNetwork(tiny("Llama", vocab_size=300), fixed_shapes=True)
    assert isinstance(on_a_gpu, KeepsKeysAndValues)
    refused("where our kernels run both on a GPU", on=on_a_gpu)
    order = weights["masked_embedding.token_ordering"]
    save_file(weights | {"masked_embedding.token_ordering": order.clone().fill_(3)}, tmp_path / "model.safetensors")
    refused("does not hold each token once")
