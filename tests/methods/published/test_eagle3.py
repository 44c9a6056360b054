"""Published EAGLE-3 heads compute what their weights say, and change no text."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_ptp import question, states
from transformers import set_seed

import saltus
from conftest import tiny_llama
from saltus.engine.target_drafters import load_drafter_for_target
from saltus.models.causal import CausalNetwork
from saltus.models.memory_use import kv_bytes_per_token

SIZES = {
    "fc.weight": (32, 96), "norm.weight": (32,), "input_layernorm.weight": (32,), "hidden_norm.weight": (32,),
    "post_attention_layernorm.weight": (32,), "self_attn.q_proj.weight": (64, 64), "self_attn.k_proj.weight": (32, 64),
    "self_attn.v_proj.weight": (32, 64), "self_attn.o_proj.weight": (32, 64), "mlp.gate_proj.weight": (48, 32),
    "mlp.up_proj.weight": (48, 32), "mlp.down_proj.weight": (32, 48),
}  # fmt: skip
TOKENS = torch.cat([torch.arange(3, 20), torch.arange(50, 200)])


def published_head(folder, form: str, **changes) -> dict[str, torch.Tensor]:
    """A random head, and its weights by the names of SIZES."""
    set_seed(13)
    weights = {name: 0.3 * torch.randn(size) + (len(size) == 1) for name, size in SIZES.items()}
    at = "midlayer." if form == "original" else "layers.0."
    saved = {name if name in ("fc.weight", "norm.weight") else at + name: weight for name, weight in weights.items()}
    weights["lm_head.weight"] = torch.randn(len(TOKENS), 32)
    saved |= {"lm_head.weight": weights["lm_head.weight"], "d2t": TOKENS - torch.arange(len(TOKENS))}
    saved["t2d"] = torch.isin(torch.arange(300), TOKENS)
    layers = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 300,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    if form == "original":
        config = layers | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(TOKENS)}
        torch.save(saved, folder / "pytorch_model.bin")
    else:
        weights["embed_tokens.weight"] = saved["embed_tokens.weight"] = torch.randn(300, 32)
        config = {
            "speculators_model_type": "eagle3", "transformer_layer_config": layers, "draft_vocab_size": len(TOKENS),
            "eagle_aux_hidden_state_layer_ids": [1, 2, 4], "norm_before_residual": True, "norm_output": True,
        }  # fmt: skip
        save_file(saved, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | changes))
    return weights


def plain_eagle3(w, embeddings, hidden_states, tokens, drafts, before_residual, norm_output):
    """The logits of each draft of the likeliest chain, row by row after Li et al. 2025, in float64."""
    w = {name: weight.double() for name, weight in w.items()}

    def norm(x, name):
        return x / (x.square().mean() + 1e-5).sqrt() * w[name]

    def rotate(x, position):
        angles = position * 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
        first, second = x[:, :8], x[:, 8:]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], 1
        )

    keys, values, logits = [], [], []

    def row(token, state):
        position, normalised = len(keys), norm(state, "hidden_norm.weight")
        x = torch.cat([norm(embeddings[token].double(), "input_layernorm.weight"), normalised])
        keys.append(rotate((w["self_attn.k_proj.weight"] @ x).view(2, 16), position))
        values.append((w["self_attn.v_proj.weight"] @ x).view(2, 16))
        query, heads = rotate((w["self_attn.q_proj.weight"] @ x).view(4, 16), position), []
        for head in range(4):
            scores = torch.stack([key[head // 2] for key in keys]) @ query[head] / 4
            heads.append(scores.softmax(0) @ torch.stack([value[head // 2] for value in values]))
        out = (normalised if before_residual else state) + w["self_attn.o_proj.weight"] @ torch.cat(heads)
        x = norm(out, "post_attention_layernorm.weight")
        gate, up = w["mlp.gate_proj.weight"] @ x, w["mlp.up_proj.weight"] @ x
        return out + w["mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)

    for token, state in zip(tokens, hidden_states, strict=True):
        out = row(token, w["fc.weight"] @ state.double())
    for _ in range(drafts):
        normalised = norm(out, "norm.weight")
        logits.append(w["lm_head.weight"] @ normalised)
        out = row(int(TOKENS[logits[-1].argmax()]), normalised if norm_output else out)
    return torch.stack(logits)


@pytest.mark.parametrize("form", ["speculators", "original"])
def test_a_published_head_computes_what_its_weights_say(tmp_path, form):
    weights = published_head(tmp_path, form)
    target = CausalNetwork(tiny_llama(num_hidden_layers=6))
    network = load_drafter_for_target(f"drafter:{tmp_path}", target, "tiny")
    own = form == "speculators"
    # without layer numbers EAGLE's: 2, the middle, and the third from last
    assert target.hidden_state_layers == ((1, 2, 4) if own else (2, 3))
    text, kv_cache = np.random.default_rng(0).integers(5, 250, 20), network.new_kv_cache()
    hidden = states(target, text)[:-1]
    network.forward([question(text[:9], hidden[:8], (0.1,) * 4)], [kv_cache])
    outputs = network.forward([question(text, hidden[8:], (0.1,) * 4)], [kv_cache])[0]
    embeddings = weights.get("embed_tokens.weight", target.model.get_input_embeddings().weight.detach())
    read = hidden[:, :96] if own else torch.cat([hidden[:, :32], hidden[:, 32:64], hidden[:, 32:64]], 1)
    expected = plain_eagle3(weights, embeddings, read, text[1:].tolist(), 4, own, own)
    torch.testing.assert_close(outputs.logits[1:], expected.float(), rtol=1e-4, atol=1e-3)
    assert outputs.token_ids.tolist() == TOKENS.tolist()
    assert kv_bytes_per_token(network) == 2 * 2 * 16 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_text_of_a_batch_has_the_bits_that_it_has_alone(tmp_path, dtype):
    published_head(tmp_path, "speculators")
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


@pytest.mark.parametrize("form", ["speculators", "original"])
def test_a_text_is_that_of_plain_decoding(tiny_folder, tmp_path, form):
    published_head(tmp_path, form)
    folder, options = str(tiny_folder(num_hidden_layers=6)), {"ptp": {"model": str(tmp_path)}}
    engine = saltus.load(folder, "ptp+lookup", options=options, adaptive=False, max_draft_tokens=8)
    for temperature in (0.0, 1.0):
        given = {"max_new_tokens": 24, "temperature": temperature, "ignore_eos": True}
        found = engine.generate(["the cat", "a dog " * 30], **given)
        plain = engine.generate(["the cat", "a dog " * 30], method="plain", **given)
        assert [one.tokens for one in found] == [one.tokens for one in plain]
        assert all(one.statistics.draft_calls for one in found)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 2}, "with 2 layers"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rotary embeddings of the type llama3"),
        ({"norm_before_fc": True}, "normalised inputs of fc"),
        ({"hidden_size": 64}, "states of 64 numbers, and tiny has 32"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}, "states of layer 6, and tiny has 6"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"fc.weight is \(32, 96\), but must be \(32, 64\)"),
    ],
)
def test_a_head_that_does_not_serve_is_refused_in_a_line(tmp_path, changes, said):
    published_head(tmp_path, "original", **changes)
    with pytest.raises(ValueError, match=said) as error:
        load_drafter_for_target(f"drafter:{tmp_path}", CausalNetwork(tiny_llama(num_hidden_layers=6)), "tiny")
    assert "\n" not in str(error.value)
