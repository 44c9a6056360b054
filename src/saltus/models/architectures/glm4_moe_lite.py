"""GLM-4.7-Flash: DeepSeek V3's layers; the configuration says which have experts."""

from typing import Any

from saltus.models.decoder_description import (
    DecoderDescription,
    deepseek_mixture,
    latent_attention,
    llama_decoder,
    llama_layer,
    llama_mlp,
)

CLASSES = {"Glm4MoeLiteForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer, kind in enumerate(config.mlp_layer_types):
        mlp = deepseek_mixture(config, layer) if kind == "sparse" else llama_mlp(config, layer)
        layers.append(llama_layer(config, layer, mixer=latent_attention(config, layer), mlp=mlp))
    return llama_decoder(config, layers)
