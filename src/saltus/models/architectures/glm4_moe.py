"""GLM-4.5 and its kin: perhaps norms of heads, part of a head is rotated; DeepSeek's experts after the first layers."""

from typing import Any

from saltus.models.decoder_description import (
    DecoderDescription,
    deepseek_mixture,
    head_norms,
    llama_attention,
    llama_decoder,
    llama_layer,
    llama_mlp,
)

CLASSES = {"Glm4MoeForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer in range(config.num_hidden_layers):
        norms = head_norms(config, layer) if config.use_qk_norm else {}
        is_sparse = layer >= config.first_k_dense_replace
        mlp = deepseek_mixture(config, layer) if is_sparse else llama_mlp(config, layer)
        layers.append(llama_layer(config, layer, mixer=llama_attention(config, layer, **norms), mlp=mlp))
    return llama_decoder(config, layers)
