"""Kimi Linear: the gated delta rule with fine decays in most layers, in the others latent attention without angles."""

from typing import Any

from saltus.models.common_layers import deepseek_mlp, latent_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription, KimiDeltaNet, NotDescribed, Weight

CLASSES = {"KimiLinearForCausalLM"}


def delta_net(config: Any, layer: int) -> KimiDeltaNet:
    """A layer with a state."""
    path = f"layers.{layer}.self_attn"
    query, key, value, weight, output = (Weight(f"{path}.{name}_proj") for name in "qkvbo")
    return KimiDeltaNet(
        query, key, value, (Weight(f"{path}.forget_gate.f_a_proj"), Weight(f"{path}.forget_gate.f_b_proj")),
        (Weight(f"{path}.g_a_proj"), Weight(f"{path}.g_b_proj")), weight, f"{path}.conv1d", f"{path}.forget_gate",
        f"{path}.o_norm", output, config.linear_num_heads, config.linear_head_dim, config.rms_norm_eps,
    )  # fmt: skip


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
