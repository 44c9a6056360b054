"""Ling 3: Kimi Linear's layers with bounded decays; latent attention has angles, and a gate of each head."""

from typing import Any

from saltus.models.architectures import deepseek_v3, kimi_linear
from saltus.models.common_layers import deepseek_mlp, latent_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription, NotDescribed
from saltus.models.gguf_architecture import (
    FULL,
    SIGMOID,
    GgufArchitecture,
    GgufModel,
    Target,
    TensorPart,
    check_gates,
    expert_counts,
    llama_config,
)
from saltus.models.mixer_description import KimiDeltaNet, Weight

CLASSES = {"BailingHybridForCausalLM"}


def delta_net(config: Any, layer: int) -> KimiDeltaNet:
    """A layer with a state."""
    path = f"layers.{layer}.self_attn"
    decay, gate = (Weight(f"{path}.forget_gate.f_proj"),), (Weight(f"{path}.g_proj"),)
    bound = {"least_decay": config.kda_lower_bound, "rounds_decay": True}
    return kimi_linear.delta_net(config, layer, decay=decay, gate=gate, **bound)


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    if config.hidden_act != "silu":
        raise NotDescribed(f"the activation {config.hidden_act}")
    for name in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        if any(getattr(config, name, None) or ()):
            raise NotDescribed("limits of gates", name)
    if not config.kda_safe_gate or config.kda_lower_bound >= 0:
        raise NotDescribed("decays without a bound, or with one that is not below zero")
    layers = []
    for layer, (kind, mlp) in enumerate(zip(config.layer_types, config.mlp_layer_types, strict=True)):
        gate = Weight(f"layers.{layer}.self_attn.g_proj")
        is_recurrent = kind == "linear_attention"
        mixer = delta_net(config, layer) if is_recurrent else latent_attention(config, layer, head_gate=gate)
        layers.append(llama_layer(config, layer, mixer=mixer, mlp=deepseek_mlp(config, layer, mlp == "sparse")))
    return llama_decoder(config, layers)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; the sizes of heads of both kinds of layers are called alike, but for latent attention."""
    check_gates(model, SIGMOID)
    if any(model.get("swiglu_clamp_exp") or ()) or any(model.get("swiglu_clamp_shexp") or ()):
        raise ValueError("its experts' gates have limits, which are not supported")
    if not model.flag("kda.safe_gate", True):
        raise ValueError("its decays have no bound, which is not supported")
    settings, recurrent = deepseek_v3.latent_settings(model), model.layers_with("ssm_f_a.weight")
    dense = model.size("leading_dense_block_count", 0, least=0)
    return llama_config(
        model, "bailing_hybrid", "BailingHybridForCausalLM", **settings | {"head_dim": model.size("kda.head_dim")},
        short_conv_kernel_size=model.size("ssm.conv_kernel"), kda_lower_bound=model.number("kda.gate_lower_bound"),
        layer_types=["linear_attention" if each else FULL for each in recurrent],
        mlp_layer_types=["dense" if layer < dense else "sparse" for layer in range(len(recurrent))],
        n_group=model.size("expert_group_count", 1), topk_group=model.size("expert_group_used_count", 1),
        norm_topk_prob=model.flag("expert_weights_norm"),
        n_shared_experts=model.size("expert_shared_count", 0, least=0),
        routed_scaling_factor=model.number("expert_weights_scale", 0.0) or 1.0,
        **expert_counts(model, "num_local_experts"),
    )  # fmt: skip


TENSORS: dict[str, Target] = {
    **kimi_linear.TENSORS, "ssm_f_a": "self_attn.forget_gate.f_proj", "ssm_g_a": "self_attn.g_proj",
    "attn_gate": "self_attn.g_proj",
    "ssm_a": TensorPart("self_attn.forget_gate.A_log", is_exponential=True, is_reshaped=True),
}  # fmt: skip
GGUF = GgufArchitecture("bailingmoe3", gguf_config, TENSORS, repeated=deepseek_v3.SPLIT)
