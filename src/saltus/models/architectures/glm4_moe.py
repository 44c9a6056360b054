"""GLM-4.5 and its kin: perhaps norms of heads, part of a head is rotated; DeepSeek's experts after the first layers."""

from typing import Any

from saltus.models.architectures.deepseek_v3 import deepseek_expert_counts
from saltus.models.architectures.glm import FUSED_QUERIES
from saltus.models.common_layers import deepseek_mlp, head_norms, llama_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import (
    GgufArchitecture,
    GgufModel,
    expert_tensors,
    llama_config,
    partial_rope,
    shared_expert_tensors,
)

CLASSES = {"Glm4MoeForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer in range(config.num_hidden_layers):
        norms = head_norms(config, layer) if config.use_qk_norm else {}
        mlp = deepseek_mlp(config, layer, layer >= config.first_k_dense_replace)
        layers.append(llama_layer(config, layer, mixer=llama_attention(config, layer, **norms), mlp=mlp))
    return llama_decoder(config, layers)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    has_biases = bool({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"} & set(model.shapes))
    return llama_config(
        model, "glm4_moe", "Glm4MoeForCausalLM", rope_parameters=partial_rope(model),
        attention_bias=has_biases,
        use_qk_norm="blk.0.attn_q_norm.weight" in model.shapes, **deepseek_expert_counts(model),
    )  # fmt: skip


TENSORS = {
    **expert_tensors(), **shared_expert_tensors("mlp.shared_experts"),
    "post_attention_norm": "post_attention_layernorm",
}  # fmt: skip
GGUF = (
    GgufArchitecture("glm4moe", gguf_config, TENSORS),
    GgufArchitecture("bailingmoe2", gguf_config, {**TENSORS, **FUSED_QUERIES}),  # Ling and Ring 2, Sarvam
)
