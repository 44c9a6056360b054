"""Models whose attention is not that of their text's keys, each layer once, are refused in a line when they load."""

import pytest
import torch
import transformers

from saltus.engine.target_network import make_network
from saltus.kernels import native
from saltus.models.long_rope import find_long_rope

SIZES = {
    "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def random_model(name: str, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | changes)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def complaint(model) -> str:
    with pytest.raises(ValueError, match="cannot be served") as told:
        make_network(model, "tiny")
    assert "\n" not in str(told.value)
    return str(told.value)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("DiffLlama", {}, "attends more than once in a layer"),
        ("Doge", {"keep_window_size": 4}, "a mask of its own"),
        (
            "GlmMoeDsa",
            {"q_lora_rank": 8, "kv_lora_rank": 8, "indexer_types": ["shared", "full"]},
            "indexed_attention layers attend to other keys",
        ),
    ],
)
def test_attention_that_the_cache_would_get_wrong_is_refused(name, changes, said):
    assert said in complaint(random_model(name, **changes))


def test_layers_that_choose_keys_run_on_our_kernels_alone(monkeypatch):
    monkeypatch.setattr(native, "load_kernels", lambda: None)
    sizes = {"q_lora_rank": 8, "kv_lora_rank": 8, "n_routed_experts": 4, "moe_intermediate_size": 8, "n_group": 1}
    said = complaint(random_model("DeepseekV32", **sizes, topk_group=1, num_experts_per_tok=2))
    assert "its indexed_attention layers choose keys, which only our own kernels can do; install a C compiler" in said


LATER = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "mlp_layer_types": ["dense"] * 2}


@pytest.mark.parametrize(
    ("setting", "value", "same"), [("sliding_windows", [8, None], [16, None]), ("swiglu_limits", [0, 7.0], [None, 0])]
)
def test_settings_of_later_versions_that_transformers_ignores_are_refused(setting, value, same, monkeypatch):
    """K-EXAONE 2.0: where a later Transformers reads the setting, its layers run."""
    assert f"ignores its {setting}" in complaint(random_model("ExaoneMoe", **LATER, **{setting: value}))
    model = random_model("ExaoneMoe", **LATER, **{setting: same})
    assert make_network(model, "tiny").compute_path == "native"
    monkeypatch.setattr(transformers.ExaoneMoeConfig, setting, None, raising=False)
    model = random_model("ExaoneMoe", **LATER, **{setting: value})
    assert make_network(model, "tiny").compute_path == "transformers"


def test_a_decoder_of_other_layers_than_its_configuration_counts_is_refused():
    sizes = {"decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "encoder_layers": 2}
    config = transformers.BartConfig(vocab_size=90, d_model=32, max_position_embeddings=256, **sizes)
    assert "it has a layer 3, but its configuration says 2" in complaint(transformers.BartForCausalLM(config).eval())


def test_rotary_angles_by_length_in_some_layers_are_refused():
    rope = {
        "full_attention": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    kinds = ["full_attention", "sliding_attention"]
    config = transformers.Gemma3TextConfig(
        **SIZES, head_dim=8, rope_parameters=rope, sliding_window=16, layer_types=kinds
    )
    model = transformers.Gemma3ForCausalLM(config).eval()
    assert "of the type dynamic" in complaint(model)


def test_a_long_call_of_the_user_leaves_the_angles_of_short_texts():
    model = random_model(
        "Llama", max_position_embeddings=32, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    )
    rope, tokens = find_long_rope(model), torch.arange(20)[None]
    with rope.angles(long=False):
        before = model(tokens).logits
    model(torch.arange(80)[None])
    with rope.angles(long=False):
        assert torch.equal(model(tokens).logits, before)
