"""Llama, and what is built alike."""

from typing import Any

from saltus.models.decoder_description import DecoderDescription, llama_decoder, llama_layer
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, llama_config

CLASSES = {"LlamaForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return llama_decoder(config, [llama_layer(config, layer) for layer in range(config.num_hidden_layers)])


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; models that see a window are Mistral's."""
    dim = model.get("attention.key_length") or model.get("rope.dimension_count")
    settings = {"head_dim": dim} if dim else {}
    if window := model.size("attention.sliding_window", 0, least=0):
        return llama_config(model, "mistral", "MistralForCausalLM", sliding_window=window, **settings)
    return llama_config(model, "llama", "LlamaForCausalLM", **settings)


GGUF = GgufArchitecture("llama", gguf_config, interleaves_heads=True)
