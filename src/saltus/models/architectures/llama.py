"""Llama, and what is built alike."""

from typing import Any

from saltus.models.common_layers import llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, expert_tensors, llama_config, num_layers

CLASSES = {"LlamaForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return llama_decoder(config, [llama_layer(config, layer) for layer in range(config.num_hidden_layers)])


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; models that see a window are Mistral's, those with experts Mixtral's."""
    dim = model.get("attention.key_length") or model.get("rope.dimension_count")
    settings = {"head_dim": dim} if dim else {}
    if model.size("expert_count", 0, least=0):
        settings |= {"num_local_experts": model.size("expert_count"), "sliding_window": None}
        top = model.size("expert_used_count")
        return llama_config(model, "mixtral", "MixtralForCausalLM", num_experts_per_tok=top, **settings)
    if window := model.size("attention.sliding_window", 0, least=0):
        return llama_config(model, "mistral", "MistralForCausalLM", sliding_window=window, **settings)
    return llama_config(model, "llama", "LlamaForCausalLM", **settings)


def plain_config(model: GgufModel) -> dict[str, Any]:
    """Of models whose code Transformers does not have, and whose layers are Llama's."""
    return llama_config(model, "llama", "LlamaForCausalLM")


def baichuan_config(model: GgufModel) -> dict[str, Any]:
    """Baichuan 7B; readers know the size by the number of layers, and 13B has no angles."""
    if num_layers(model) == 40:
        raise ValueError("it biases scores by distance (ALiBi, Baichuan 13B), which is not supported")
    return plain_config(model)


GGUF = (
    GgufArchitecture("llama", gguf_config, expert_tensors(), interleaves_heads=True),
    GgufArchitecture("internlm2", plain_config, interleaves_heads=True),
    GgufArchitecture("xverse", plain_config, interleaves_heads=True),
    GgufArchitecture("baichuan", baichuan_config, interleaves_heads=True),
    GgufArchitecture("pangu-embedded", plain_config),
)
