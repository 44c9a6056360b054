"""Llama, and what is built alike."""

from typing import Any

from saltus.models.decoder_description import DecoderDescription, llama_decoder, llama_layer

CLASSES = {"LlamaForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return llama_decoder(config, [llama_layer(config, layer) for layer in range(config.num_hidden_layers)])
