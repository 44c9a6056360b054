"""Qwen3: a norm of each head of queries and keys."""

from typing import Any

from saltus.models.common_layers import head_norms, llama_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import GgufArchitecture, llama_config

CLASSES = {"Qwen3ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    has_sinks, layers = getattr(config, "attention_sinks", False), []  # of drafters
    for layer in range(config.num_hidden_layers):
        sinks = f"layers.{layer}.self_attn.attention_sink_bias" if has_sinks else None
        attention = llama_attention(config, layer, sinks=sinks, **head_norms(config, layer))
        layers.append(llama_layer(config, layer, mixer=attention))
    return llama_decoder(config, layers)


GGUF = tuple(  # also the text part of Qwen3-VL
    GgufArchitecture(name, lambda model: llama_config(model, "qwen3", "Qwen3ForCausalLM"))
    for name in ("qwen3", "qwen3vl")
)
