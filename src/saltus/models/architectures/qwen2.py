"""Qwen2: layers as Llama's."""

from typing import Any

from saltus.models.architectures import llama
from saltus.models.architectures.glm import FUSED_QUERIES
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, llama_config

CLASSES = {"Qwen2ForCausalLM"}
describe = llama.describe


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    return llama_config(model, "qwen2", "Qwen2ForCausalLM")


def qwen_config(model: GgufModel) -> dict[str, Any]:
    """The first Qwen; its files count the gates and values of an MLP together."""
    width = model.size("feed_forward_length", least=2) // 2
    has_biases = "blk.0.attn_qkv.bias" in model.shapes
    return llama_config(model, "qwen2", "Qwen2ForCausalLM", intermediate_size=width, attention_bias=has_biases)


GGUF = (
    GgufArchitecture("qwen2", gguf_config),
    GgufArchitecture("qwen2vl", gguf_config),  # the text part of Qwen2-VL and Qwen2.5-VL
    GgufArchitecture("qwen", qwen_config, FUSED_QUERIES),
)
