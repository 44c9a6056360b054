"""The text of Llama 3.2 Vision: Llama's layers; those that attend to pictures add nothing without one."""

from typing import Any

from saltus.models.common_layers import llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription, Layer

CLASSES = {"MllamaForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return llama_decoder(
        config,
        [
            Layer(None, None, None, None) if layer in config.cross_attention_layers else llama_layer(config, layer)
            for layer in range(config.num_hidden_layers)
        ],
    )
