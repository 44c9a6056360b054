"""Step 3.5 and 3.7: gates of heads, more heads and all of them rotated in windows, limited experts by sigmoids."""

from dataclasses import replace
from typing import Any

from saltus.models.common_layers import head_norms, llama_attention, llama_decoder, llama_mlp, mixture
from saltus.models.decoder_description import MLP, DecoderDescription, Experts, Layer
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
    same_for_layers,
    shared_expert_tensors,
)
from saltus.models.mixer_description import Angles, Norm, Weight

CLASSES = {"Step3p5ForCausalLM"}
LIMITS = {"swiglu_limits": "swiglu_clamp_exp", "swiglu_limits_shared": "swiglu_clamp_shexp"}  # and their names in GGUF


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer, kind in enumerate(config.layer_types):
        path = f"layers.{layer}"
        mixer = llama_attention(
            config.per_layer_config[layer], layer, scale=config.query_pre_attn_scalar**-0.5,
            angles=Angles(layer_type=kind), head_gate=Weight(f"{path}.self_attn.g_proj"),
            **head_norms(config, layer, kind="rms-float32", offset=1.0),
        )  # fmt: skip
        norms = [_norm(config, f"{path}.{name}_layernorm") for name in ("input", "post_attention")]
        layers.append(Layer(mixer, _mlp(config, layer), norms[0], norms[1]))
    return llama_decoder(config, layers, norm=_norm(config, "norm"))


def _norm(config: Any, path: str) -> Norm:
    return Norm(path, config.rms_norm_eps, "rms-float32", offset=1.0)


def _mlp(config: Any, layer: int) -> MLP | Experts:
    """A plain MLP is limited as shared experts are."""
    limits = {name: (getattr(config, name) or {layer: 0})[layer] or 0.0 for name in LIMITS}
    if config.mlp_layer_types[layer] == "dense":
        return replace(llama_mlp(config, layer), limit=limits["swiglu_limits_shared"])
    shared = replace(llama_mlp(config, layer, "mlp.shared_experts"), limit=limits["swiglu_limits_shared"])
    return mixture(
        config, layer, scoring="sigmoid", is_normalized=True, scale=config.moe_router_scaling_factor,
        selection_bias=f"layers.{layer}.mlp.gate.e_score_correction_bias", shared=shared,
        limit=limits["swiglu_limits"],
    )  # fmt: skip


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture. Layers without a window rotate half of each head; all have as many heads of keys.

    Transformers' configuration needs a number for padding.
    """
    check_gates(model, SIGMOID)
    layers, kinds = num_layers(model), layer_types(model, 1)
    blocks = model.size("block_count")
    heads = {kind: count for count, kind in zip(model.sizes("attention.head_count", blocks), kinds, strict=False)}
    kv_heads = same_for_layers(model.sizes("attention.head_count_kv", blocks)[:layers], "heads of keys")
    full = rope(model) | {"partial_rotary_factor": 0.5}
    theta = model.number("rope.freq_base_swa", full["rope_theta"])
    local = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 1.0}
    whole = max(heads.values())
    of_heads = replace(model, metadata={**model.metadata, f"{model.name}.attention.head_count": heads.get(FULL, whole)})
    return llama_config(
        of_heads, "step3p5", "Step3p5ForCausalLM", num_key_value_heads=kv_heads, layer_types=kinds,
        num_sliding_attention_heads=heads.get(SLIDING, whole), sliding_window=model.size("attention.sliding_window"),
        mlp_layer_types=["sparse" if has else "dense" for has in model.layers_with("ffn_gate_inp.weight")],
        moe_router_scaling_factor=model.number("expert_weights_scale", 1.0),
        share_expert_dim=model.size("expert_shared_feed_forward_length"), rope_parameters={FULL: full, SLIDING: local},
        **{ours: model.numbers(theirs, blocks, [0.0] * blocks)[:layers] for ours, theirs in LIMITS.items()},
        pad_token_id=0, **expert_counts(model, "n_routed_experts"),
    )  # fmt: skip


TENSORS = {**expert_tensors(), **shared_expert_tensors("mlp.shared_experts"), "attn_gate": "self_attn.g_proj"}
GGUF = GgufArchitecture("step35", gguf_config, TENSORS, added_to_norms=1)
