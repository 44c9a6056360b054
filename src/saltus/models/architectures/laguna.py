"""Laguna: heads by layer, with norms and gates; other rotation in windows; experts by sigmoids beside a shared one."""

from dataclasses import replace
from typing import Any

from saltus.models.common_layers import head_norms, llama_attention, llama_decoder, llama_layer, llama_mlp, mixture
from saltus.models.decoder_description import DecoderDescription, NotDescribed
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
    num_layers,
    rope,
    shared_expert_tensors,
)
from saltus.models.mixer_description import Angles, Weight

CLASSES = {"LagunaForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    if config.moe_router_logit_softcapping:
        raise NotDescribed("a router with capped logits")
    gate, layers = "head_gate" if config.gating in (True, "per-head") else "gate", []
    for layer, kind in enumerate(config.layer_types):
        path = f"layers.{layer}"
        mixer = llama_attention(
            config, layer, heads=config.num_attention_heads_per_layer[layer], angles=Angles(layer_type=kind),
            gate_activation="softplus", **{gate: Weight(f"{path}.self_attn.g_proj")}, **head_norms(config, layer),
        )  # fmt: skip
        experts = mixture(
            config, layer, scoring="sigmoid", is_normalized=True, scale=config.moe_routed_scaling_factor,
            selection_bias=f"{path}.mlp.gate.e_score_correction_bias",
            shared=llama_mlp(config, layer, "mlp.shared_experts") if config.shared_expert_intermediate_size else None,
        )  # fmt: skip
        is_sparse = config.mlp_layer_types[layer] == "sparse"
        layers.append(llama_layer(config, layer, mixer=mixer, mlp=experts if is_sparse else llama_mlp(config, layer)))
    return llama_decoder(config, layers)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture. Files mostly do not say which layers see a window: all but each fourth, from the first."""
    check_gates(model, SIGMOID)
    if not model.flag("expert_weights_norm"):
        raise ValueError("it does not normalise the weights of experts, which Transformers does; it is not supported")
    layers, dense = num_layers(model), model.size("leading_dense_block_count", 0, least=0)
    heads, dim = model.sizes("attention.head_count", layers), model.size("attention.key_length")
    window, period = (
        model.size("attention.sliding_window", 0, least=0),
        model.get("attention.sliding_window_pattern", 4),
    )
    kinds = [FULL if not window or layer % 4 == 0 else SLIDING for layer in range(layers)]
    full = rope(model) | {"partial_rotary_factor": model.size("rope.dimension_count", dim) / dim}
    local = {
        "rope_type": "default", "rope_theta": model.number("rope.freq_base_swa", full["rope_theta"]),
        "partial_rotary_factor": model.size("rope.dimension_count_swa", dim) / dim,
    }  # fmt: skip
    of_heads = replace(model, metadata={**model.metadata, f"{model.name}.attention.head_count": max(heads)})
    return llama_config(
        of_heads, "laguna", "LagunaForCausalLM", num_attention_heads_per_layer=heads, sliding_window=window or 512,
        layer_types=layer_types(model, 4) if isinstance(period, list) else kinds,
        mlp_layer_types=["dense" if layer < dense else "sparse" for layer in range(layers)],
        gating="per-head" if model.rows("blk.0.attn_gate.weight") == heads[0] else "per-element",
        moe_routed_scaling_factor=model.number("expert_weights_scale", 1.0),
        shared_expert_intermediate_size=model.size("expert_shared_feed_forward_length", 0, least=0),
        rope_parameters={FULL: full, SLIDING: local}, **expert_counts(model),
    )  # fmt: skip


TENSORS = {**expert_tensors(), **shared_expert_tensors("mlp.shared_experts"), "attn_gate": "self_attn.g_proj"}
GGUF = GgufArchitecture("laguna", gguf_config, TENSORS)
