"""Qwen3-MoE: norms of heads as in Qwen3, and mixtures of experts; some layers may have a plain MLP."""

from typing import Any

from saltus.models.architectures.qwen2_moe import qwen_moe_config
from saltus.models.common_layers import (
    head_norms,
    llama_attention,
    llama_decoder,
    llama_layer,
    llama_mlp,
    mixture,
    sparse_layers,
)
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, expert_tensors

CLASSES = {"Qwen3MoeForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer, is_sparse in enumerate(sparse_layers(config)):
        attention = llama_attention(config, layer, **head_norms(config, layer))
        mlp = mixture(config, layer, is_normalized=config.norm_topk_prob) if is_sparse else llama_mlp(config, layer)
        layers.append(llama_layer(config, layer, mixer=attention, mlp=mlp))
    return llama_decoder(config, layers)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    return qwen_moe_config(
        model, "qwen3_moe", "Qwen3MoeForCausalLM", norm_topk_prob=True, use_sliding_window=False, sliding_window=None
    )  # fmt: skip


GGUF = tuple(GgufArchitecture(name, gguf_config, expert_tensors()) for name in ("qwen3moe", "qwen3vlmoe"))
