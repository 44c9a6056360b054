"""A.X K1: DeepSeek V3's layers, with a norm after the experts."""

from typing import Any

from saltus.models.common_layers import deepseek_mlp, latent_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription
from saltus.models.mixer_description import Norm

CLASSES = {"AXK1ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer, kind in enumerate(config.mlp_layer_types):
        is_sparse = kind == "sparse"
        norm = Norm(f"layers.{layer}.mlp.post_mlp_layernorm", config.rms_norm_eps) if is_sparse else None
        mlp = deepseek_mlp(config, layer, is_sparse)
        layers.append(llama_layer(config, layer, mixer=latent_attention(config, layer), mlp=mlp, mlp_output_norm=norm))
    return llama_decoder(config, layers)
