"""ERNIE 4.5 without experts: Llama's layers; interleaved rotary embeddings."""

from typing import Any

from saltus.models.common_layers import llama_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, llama_config

CLASSES = {"Ernie4_5ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = [
        llama_layer(config, layer, mixer=llama_attention(config, layer, rope_interleaved=True))
        for layer in range(config.num_hidden_layers)
    ]
    return llama_decoder(config, layers)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    return llama_config(model, "ernie4_5", "Ernie4_5ForCausalLM", use_bias="blk.0.attn_q.bias" in model.shapes)


GGUF = GgufArchitecture("ernie4_5", gguf_config)
