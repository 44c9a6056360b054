"""Solar Open: Llama's attention, and DeepSeek's experts in every layer."""

from typing import Any

from saltus.models.common_layers import deepseek_mixture, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription

CLASSES = {"SolarOpenForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = [
        llama_layer(config, layer, mlp=deepseek_mixture(config, layer)) for layer in range(config.num_hidden_layers)
    ]
    return llama_decoder(config, layers)
