"""MiMo V2 Flash: windows with sinks and twice the key heads in most layers, short scaled values, experts by sigmoid."""

from typing import Any

from saltus.models.common_layers import deepseek_mlp, llama_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import (
    FULL,
    SIGMOID,
    SLIDING,
    GgufArchitecture,
    GgufModel,
    check_gates,
    expert_counts,
    expert_tensors,
    layer_types,
    llama_config,
    partial_rope,
)
from saltus.models.mixer_description import Angles

CLASSES = {"MiMoV2FlashForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer, kind in enumerate(config.layer_types):
        slides = kind == SLIDING
        mixer = llama_attention(
            config, layer, kv_heads=config.num_key_value_heads * (2 if slides else 1), value_dim=config.v_head_dim,
            value_scale=1.0 if config.attention_value_scale is None else config.attention_value_scale,
            angles=Angles(layer_type=kind), sinks=f"layers.{layer}.self_attn.sinks" if slides else None,
        )  # fmt: skip
        mlp = deepseek_mlp(config, layer, config.mlp_layer_types[layer] == "sparse")
        layers.append(llama_layer(config, layer, mixer=mixer, mlp=mlp))
    return llama_decoder(config, layers)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; older converters left out how values are scaled.

    A window of 128 are as many tokens before each, and the token itself (as Transformers reads it).
    """
    check_gates(model, SIGMOID)
    kinds = layer_types(model, 6)
    kv_heads = _kv_heads(model.sizes("attention.head_count_kv", model.size("block_count"), least=0), kinds)
    has_experts = model.layers_with("ffn_gate_inp.weight")
    full = partial_rope(model)
    local = full | {"rope_type": "default", "rope_theta": model.number("rope.freq_base_swa", full["rope_theta"])}
    return llama_config(
        model, "mimo_v2_flash", "MiMoV2FlashForCausalLM", num_key_value_heads=kv_heads, layer_types=kinds,
        sliding_window=model.size("attention.sliding_window") + 1, rope_parameters={FULL: full, SLIDING: local},
        v_head_dim=model.size("attention.value_length"),
        attention_value_scale=model.number("attention.value_scale", 0.707),
        mlp_layer_types=["sparse" if sparse else "dense" for sparse in has_experts],
        n_group=model.size("expert_group_count", 1), topk_group=model.size("expert_group_used_count", 1),
        routed_scaling_factor=model.number("expert_weights_scale", 0.0) or 1.0,
        **expert_counts(model, "n_routed_experts"),
    )  # fmt: skip


def _kv_heads(heads: list[int], kinds: list[str]) -> int:
    """The key heads of layers without a window, by those of all layers."""
    halved = {count // (2 if kind == SLIDING else 1) for count, kind in zip(heads, kinds, strict=False)}
    if (
        len(halved) > 1
        or 0 in halved
        or any(count % 2 for count, kind in zip(heads, kinds, strict=False) if kind == SLIDING)
    ):
        raise ValueError("its windows do not have twice the key heads of other layers, which is not supported")
    return halved.pop()


TENSORS = expert_tensors() | {"attn_sinks.weight": "self_attn.sinks"}
GGUF = GgufArchitecture("mimo2", gguf_config, TENSORS)
