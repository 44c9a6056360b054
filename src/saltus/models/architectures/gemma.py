"""Gemma: Llama's layers with Gemma's norms and embeddings."""

from typing import Any

from saltus.models.architectures.gemma2 import decoder, norm
from saltus.models.common_layers import llama_layer
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, llama_config

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


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    return llama_config(model, "gemma", "GemmaForCausalLM", hidden_act="gelu_pytorch_tanh")


GGUF = GgufArchitecture("gemma", gguf_config, added_to_norms=1)
