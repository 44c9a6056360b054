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


def decoder(config: Any, has_experts: list[bool]) -> DecoderDescription:
    """Layers with latent attention, and with experts where it says so."""
    layers = []
    for layer, is_sparse in enumerate(has_experts):
        mlp = deepseek_mixture(config, layer) if is_sparse else llama_mlp(config, layer)
        layers.append(llama_layer(config, layer, mixer=latent_attention(config, layer), mlp=mlp))
    return llama_decoder(config, layers)


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return decoder(config, [layer >= config.first_k_dense_replace for layer in range(config.num_hidden_layers)])
