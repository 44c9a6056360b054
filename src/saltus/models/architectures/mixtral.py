"""Mixtral: Mistral with a mixture of experts in every layer."""

from typing import Any

from saltus.models.common_layers import llama_decoder, llama_layer, mixture
from saltus.models.decoder_description import DecoderDescription

CLASSES = {"MixtralForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = [
        llama_layer(config, layer, mlp=mixture(config, layer, is_normalized=True))
        for layer in range(config.num_hidden_layers)
    ]
    return llama_decoder(config, layers)
