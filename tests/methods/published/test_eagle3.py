"""Published EAGLE-3 and P-EAGLE heads compute what their weights say."""

import json

import numpy as np
import pytest
import torch
from reference_eagle import LLAMA3, TOKENS, YARN, PlainEagle, published_head
from test_ptp import question, states

from saltus.engine.target_drafters import load_drafter_for_target
from saltus.models.causal import CausalNetwork
from saltus.models.memory_use import kv_bytes_per_token
from tiny_models import tiny_llama

FORMS = {  # what a published head may be
    "speculators": ("speculators", {}, {}),
    "original": ("original", {}, {}),
    "authors": ("original", {}, {"architectures": ["LlamaForCausalLM"]}),
    "3.1": ("speculators", {}, {"fc_norm": True}),
    "gpt-oss": ("speculators", {"rope_scaling": YARN}, {"norm_before_fc": True, "norm_output": False}),
    "llama3": ("original", {"rope_scaling": LLAMA3, "attention_bias": True}, {}),
    "qwen3": ("speculators", {"model_type": "qwen3"}, {}),
    "windows": ("speculators", {"layer_types": ["sliding_attention"], "sliding_window": 6}, {}),
    "parallel": ("peagle", {"num_hidden_layers": 2}, {}),
    "parallel, windows": (
        "peagle",
        {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6},
        {"fc_norm": True},
    ),
}


@pytest.mark.parametrize(("form", "layers", "changes"), FORMS.values(), ids=FORMS)
def test_a_published_head_computes_what_its_weights_say(tmp_path, form, layers, changes):
    weights, config = published_head(tmp_path, form, layers, **changes)
    target = CausalNetwork(tiny_llama(num_hidden_layers=6))
    network = load_drafter_for_target(f"drafter:{tmp_path}", target, "tiny")
    own = form != "original"
    # without layer numbers EAGLE's: 2, the middle, and the third from last
    assert target.hidden_state_layers == ((1, 2, 4) if own else (2, 3))
    text, kv_cache = np.random.default_rng(0).integers(5, 250, 20), network.new_kv_cache()
    hidden = states(target, text)[:-1]
    network.forward([question(text[:9], hidden[:8], (0.1,) * 4)], [kv_cache])
    outputs = network.forward([question(text, hidden[8:], (0.1,) * 4)], [kv_cache])[0]
    embeddings = weights.get("embed_tokens.weight", target.model.get_input_embeddings().weight.detach())
    read = hidden[:, :96] if own else torch.cat([hidden[:, :32], hidden[:, 32:64], hidden[:, 32:64]], 1)
    plain = PlainEagle(weights, config, embeddings)
    expected = (plain.block if form == "peagle" else plain.chain)(read, text[1:].tolist(), 4)
    torch.testing.assert_close(outputs.logits[1:], expected.float(), rtol=1e-4, atol=2e-3)
    assert outputs.token_ids.tolist() == TOKENS.tolist()
    assert kv_bytes_per_token(network) == 2 * 2 * 16 * 4 * (2 if form == "peagle" else 1)


def test_layers_in_a_table_of_its_own_count_from_the_first_output(tmp_path):
    published_head(tmp_path, "original", eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 4]})
    target = CausalNetwork(tiny_llama(num_hidden_layers=6))
    load_drafter_for_target(f"drafter:{tmp_path}", target, "tiny")
    assert target.hidden_state_layers == (1, 2, 5)


def rewrite(folder, **changes) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def network(folder):
    target = CausalNetwork(tiny_llama(num_hidden_layers=6))
    return load_drafter_for_target(f"drafter:{folder}", target, "tiny")


def test_the_authors_only_layer_is_one_where_the_number_is_that_of_the_target(tmp_path):
    published_head(tmp_path, "original")
    rewrite(tmp_path, architectures=["LlamaForCausalLM"], num_hidden_layers=40)
    assert network(tmp_path).model.shape.layers == 1
    other = tmp_path / "speculators"
    _, config = published_head(other)
    rewrite(other, transformer_layer_config=config["transformer_layer_config"] | {"num_hidden_layers": 20})
    with pytest.raises(ValueError, match="a model of 20 layers has"):
        network(other)


@pytest.mark.parametrize(
    ("form", "names"),
    [
        ("original", ["Eagle3MiniMaxM2ForCausalLM"]),
        ("original", ["Eagle3Qwen3vlForCausalLM"]),
        ("peagle", ["PeagleLlamaForCausalLM"]),
        ("peagle", ["PeagleQwen3ForCausalLM"]),
    ],
)
def test_heads_are_known_by_the_names_that_vllm_has_for_them(tmp_path, form, names):
    published_head(tmp_path, form)
    rewrite(tmp_path, architectures=names, speculators_model_type=None)
    assert type(network(tmp_path)).__name__ == ("PEagleNetwork" if form == "peagle" else "Eagle3Network")


def test_norms_of_each_state_have_an_older_name_in_sglang(tmp_path):
    published_head(tmp_path, "original", fc_norm=True)
    rewrite(tmp_path, fc_norm=None, use_aux_norm=True)
    assert network(tmp_path).model.shape.norm_each


@pytest.mark.parametrize("form", ["speculators", "peagle"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_text_of_a_batch_has_the_bits_that_it_has_alone(tmp_path, dtype, form):
    published_head(tmp_path, form)
    target = CausalNetwork(tiny_llama(num_hidden_layers=6).to(dtype))
    network, random = load_drafter_for_target(f"drafter:{tmp_path}", target, "tiny"), np.random.default_rng(3)
    texts = [random.integers(5, 250, length + 5) for length in (3, 40, 300, 17)]
    hidden = [states(target, text) for text in texts]
    together, apart = ([network.new_kv_cache() for _ in texts] for _ in range(2))
    for begin, end in ((1, -3), (-3, 0)):
        questions = [
            question(text[: len(text) + end], of[begin - 1 : len(text) + end - 1], (0.5,) * number)
            for number, (text, of) in enumerate(zip(texts, hidden, strict=True))
        ]
        expected = [network.forward([one], [cache])[0] for one, cache in zip(questions, apart, strict=True)]
        for found, alone in zip(network.forward(questions, together), expected, strict=True):
            assert torch.equal(found.logits, alone.logits)
            assert torch.equal(found.hidden_states, alone.hidden_states)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rotary embeddings of the type dynamic"),
        ({"norm_before_fc": True}, "lacks input_norm.weight"),
        ({"fc_norm": True}, "lacks fc_norm.0.weight"),
        ({"attention_bias": True}, "lacks layers.0.self_attn.k_proj.bias"),
        ({"layer_types": ["sliding_attention"]}, "a sliding window of None"),
        ({"mlp_bias": True}, "biases of its feed-forward layers"),
        ({"hidden_size": 64}, "states of 64 numbers, and tiny has 32"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 7]}, "states of layer 7, and tiny has 6"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"fc.weight is \(32, 96\), but must be \(32, 64\)"),
    ],
)
def test_a_head_that_does_not_serve_is_refused_in_a_line(tmp_path, changes, said):
    published_head(tmp_path, "original")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=said) as error:
        load_drafter_for_target(f"drafter:{tmp_path}", CausalNetwork(tiny_llama(num_hidden_layers=6)), "tiny")
    assert "\n" not in str(error.value)
