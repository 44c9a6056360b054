"""ERNIE 4.5 without experts: Llama's layers; interleaved rotary embeddings."""

from typing import Any

from saltus.models.decoder_description import DecoderDescription, llama_attention, llama_decoder, llama_layer

CLASSES = {"Ernie4_5ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = [
        llama_layer(config, layer, mixer=llama_attention(config, layer, rope_interleaved=True))
        for layer in range(config.num_hidden_layers)
    ]
    return llama_decoder(config, layers)
