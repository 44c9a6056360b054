"""Phi-3 and Phi-4: Llama's layers with fused weights; a part of each head may be rotated."""

from typing import Any

from saltus.models.decoder_description import (
    DecoderDescription,
    fused_attention,
    fused_mlp,
    llama_decoder,
    llama_layer,
)

CLASSES = {"Phi3ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = [
        llama_layer(config, layer, mixer=fused_attention(config, layer), mlp=fused_mlp(config, layer))
        for layer in range(config.num_hidden_layers)
    ]
    return llama_decoder(config, layers)
