"""Kimi Linear: the gated delta rule with channel-wise decays in most layers, else latent attention without angles."""

from typing import Any

from saltus.models.architectures import deepseek_v3
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

CLASSES = {"KimiLinearForCausalLM"}


def delta_net(config: Any, layer: int, **changes: Any) -> KimiDeltaNet:
    """A layer with a state, changed in places."""
    path = f"layers.{layer}.self_attn"
    settings: dict[str, Any] = {
        **{name: Weight(f"{path}.{name[0]}_proj") for name in ("query", "key", "value", "output")},
        "weight": Weight(f"{path}.b_proj"), "kernel": f"{path}.conv1d", "decays": f"{path}.forget_gate",
        "norm": f"{path}.o_norm", "heads": config.linear_num_heads, "dim": config.linear_head_dim,
        "epsilon": config.rms_norm_eps,
        "decay": (Weight(f"{path}.forget_gate.f_a_proj"), Weight(f"{path}.forget_gate.f_b_proj")),
        "gate": (Weight(f"{path}.g_a_proj"), Weight(f"{path}.g_b_proj")),
    }  # fmt: skip
    return KimiDeltaNet(**settings | changes)


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    if config.hidden_act != "silu":
        raise NotDescribed(f"the activation {config.hidden_act}")
    layers = []
    for layer, (kind, mlp) in enumerate(zip(config.layer_types, config.mlp_layer_types, strict=True)):
        is_recurrent = kind == "linear_attention"
        mixer = delta_net(config, layer) if is_recurrent else latent_attention(config, layer, angles=None)
        layers.append(llama_layer(config, layer, mixer=mixer, mlp=deepseek_mlp(config, layer, mlp == "sparse")))
    return llama_decoder(config, layers)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    check_gates(model, SIGMOID)
    heads, rotated = model.size("attention.head_count"), model.size("rope.dimension_count")
    recurrent, dense = model.layers_with("ssm_f_a.weight"), model.size("leading_dense_block_count", 0, least=0)
    return llama_config(
        model, "kimi_linear", "KimiLinearForCausalLM", num_key_value_heads=heads, head_dim=rotated,
        qk_rope_head_dim=rotated, qk_nope_head_dim=model.size("attention.key_length_mla") - rotated,
        v_head_dim=model.size("attention.value_length_mla"), kv_lora_rank=model.size("attention.kv_lora_rank"),
        q_lora_rank=model.size("attention.q_lora_rank", 0, least=0) or None,
        linear_head_dim=model.size("kda.head_dim"), linear_num_heads=heads,
        linear_conv_kernel_dim=model.size("ssm.conv_kernel"),
        layer_types=["linear_attention" if each else FULL for each in recurrent],
        mlp_layer_types=["dense" if layer < dense else "sparse" for layer in range(len(recurrent))],
        n_group=model.size("expert_group_count", 1), topk_group=model.size("expert_group_used_count", 1),
        norm_topk_prob=model.flag("expert_weights_norm", True),
        num_shared_experts=model.size("expert_shared_count", 0, least=0),
        routed_scaling_factor=model.number("expert_weights_scale", 0.0) or 1.0,
        **expert_counts(model, "num_local_experts"),
    )  # fmt: skip


TENSORS: dict[str, Target] = {
    **deepseek_v3.TENSORS, "ssm_f_a": "self_attn.forget_gate.f_a_proj", "ssm_f_b": "self_attn.forget_gate.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj", "ssm_g_b": "self_attn.g_b_proj", "ssm_beta": "self_attn.b_proj",
    "ssm_norm": "self_attn.o_norm", "ssm_dt.bias": "self_attn.forget_gate.dt_bias",
    "ssm_a": TensorPart("self_attn.forget_gate.A_log", is_negative_exponential=True, is_reshaped=True),
    **{
        f"ssm_conv1d_{name}.weight": TensorPart("self_attn.conv1d.weight", number, is_reshaped=True)
        for number, name in enumerate("qkv")
    },
}  # fmt: skip
GGUF = GgufArchitecture("kimi-linear", gguf_config, TENSORS, repeated=deepseek_v3.SPLIT)
