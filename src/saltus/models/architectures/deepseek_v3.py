"""DeepSeek V3: latent attention, and experts after the first layers."""

from typing import Any

from saltus.models.decoder_description import (
    DecoderDescription,
    deepseek_mixture,
    latent_attention,
    llama_decoder,
    llama_layer,
    llama_mlp,
)

CLASSES = {"DeepseekV3ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer in range(config.num_hidden_layers):
        is_sparse = layer >= config.first_k_dense_replace
        mlp = deepseek_mixture(config, layer) if is_sparse else llama_mlp(config, layer)
        layers.append(llama_layer(config, layer, mixer=latent_attention(config, layer), mlp=mlp))
    return llama_decoder(config, layers)
