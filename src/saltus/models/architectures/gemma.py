"""Gemma: Llama's layers with Gemma's norms and embeddings."""

from typing import Any

from saltus.models.architectures.gemma2 import decoder, norm
from saltus.models.decoder_description import DecoderDescription, llama_layer

CLASSES = {"GemmaForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = [
        llama_layer(
            config, layer, mixer_norm=norm(config, f"layers.{layer}.input_layernorm"),
            mlp_norm=norm(config, f"layers.{layer}.post_attention_layernorm"),
        )
        for layer in range(config.num_hidden_layers)
    ]  # fmt: skip
    return decoder(config, layers)
