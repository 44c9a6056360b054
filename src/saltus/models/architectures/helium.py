"""Helium: Llama's layers with interleaved rotary embeddings."""

from typing import Any

from saltus.models.common_layers import llama_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription
from saltus.models.mixer_description import Norm

CLASSES = {"HeliumForCausalLM"}


def norm(config: Any, path: str) -> Norm:
    """Helium's norm."""
    return Norm(path, config.rms_norm_eps, "rms-float32")


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = [
        llama_layer(
            config, layer, mixer=llama_attention(config, layer, rope_interleaved=True),
            mixer_norm=norm(config, f"layers.{layer}.input_layernorm"),
            mlp_norm=norm(config, f"layers.{layer}.post_attention_layernorm"),
        )
        for layer in range(config.num_hidden_layers)
    ]  # fmt: skip
    return llama_decoder(config, layers, norm=norm(config, "norm"))
