"""OLMo Hybrid: the gated delta rule, whose weights may exceed one, in most layers; OLMo 3's attention in the others."""

from typing import Any

from saltus.models.architectures import olmo2
from saltus.models.common_layers import llama_layer
from saltus.models.decoder_description import DecoderDescription, NotDescribed
from saltus.models.mixer_description import Angles, DeltaNet, Norm, Weight

CLASSES = {"OlmoHybridForCausalLM"}


def delta_net(config: Any, path: str) -> DeltaNet:
    """A layer with a state; weights up to two give the state's matrix negative eigenvalues (Grazzi et al. 2025)."""
    return DeltaNet(
        tuple(Weight(f"{path}.{name}_proj") for name in "qkvgba"), path, Weight(f"{path}.o_proj"),
        heads=config.linear_num_value_heads, groups=config.linear_num_key_heads, key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim, epsilon=1e-5, norm="o_norm",
        weight_scale=2.0 if config.linear_allow_neg_eigval else 1.0,
    )  # fmt: skip


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    if config.hidden_act != "silu":
        raise NotDescribed(f"the activation {config.hidden_act}")
    has_angles = (config.rope_parameters or {}).get("rope_theta") is not None
    angles = Angles() if has_angles else None
    attention = [olmo2.attention(config, layer, angles=angles) for layer in range(config.num_hidden_layers)]
    around = olmo2.decoder(config, attention)
    layers = list(around.layers)
    for number, kind in enumerate(config.layer_types):
        if kind == "linear_attention":
            path, epsilon = f"layers.{number}", config.rms_norm_eps
            norms = {
                name: Norm(f"{path}.{norm}", epsilon, "rms-float32")
                for name, norm in (("mixer_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm"))
            }
            layers[number] = llama_layer(config, number, mixer=delta_net(config, f"{path}.linear_attn"), **norms)
    return DecoderDescription(tuple(layers), around.norm)
