"""Qwen3: a norm of each head of queries and keys."""

from typing import Any

from saltus.models.common_layers import head_norms, llama_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import GgufArchitecture, llama_config

CLASSES = {"Qwen3ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = [
        llama_layer(config, layer, mixer=llama_attention(config, layer, **head_norms(config, layer)))
        for layer in range(config.num_hidden_layers)
    ]
    return llama_decoder(config, layers)


GGUF = GgufArchitecture("qwen3", lambda model: llama_config(model, "qwen3", "Qwen3ForCausalLM"))
