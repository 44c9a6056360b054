"""Helium: Llama's layers with interleaved rotary embeddings."""

from typing import Any

from saltus.models.common_layers import float32_norm, llama_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription

CLASSES = {"HeliumForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = [
        llama_layer(
            config, layer, mixer=llama_attention(config, layer, rope_interleaved=True),
            mixer_norm=float32_norm(config, f"layers.{layer}.input_layernorm"),
            mlp_norm=float32_norm(config, f"layers.{layer}.post_attention_layernorm"),
        )
        for layer in range(config.num_hidden_layers)
    ]  # fmt: skip
    return llama_decoder(config, layers, norm=float32_norm(config, "norm"))
