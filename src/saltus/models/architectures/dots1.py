"""dots.llm1: Qwen3's attention, some layers perhaps with a window; DeepSeek's experts after the first layers."""

from typing import Any

from saltus.models.architectures.deepseek_v3 import deepseek_expert_counts
from saltus.models.common_layers import deepseek_mlp, head_norms, llama_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import (
    SIGMOID,
    GgufArchitecture,
    GgufModel,
    check_gates,
    expert_tensors,
    llama_config,
    shared_expert_tensors,
)

CLASSES = {"Dots1ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer in range(config.num_hidden_layers):
        attention = llama_attention(config, layer, **head_norms(config, layer))
        mlp = deepseek_mlp(config, layer, layer >= config.first_k_dense_replace)
        layers.append(llama_layer(config, layer, mixer=attention, mlp=mlp))
    return llama_decoder(config, layers)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    check_gates(model, SIGMOID)
    return llama_config(model, "dots1", "Dots1ForCausalLM", sliding_window=None, **deepseek_expert_counts(model))


GGUF = GgufArchitecture("dots1", gguf_config, expert_tensors() | shared_expert_tensors("mlp.shared_experts"))
