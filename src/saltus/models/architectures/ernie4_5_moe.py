"""ERNIE 4.5 with experts: chosen by softmax and a bias, beside shared ones; interleaved rotary embeddings."""

from typing import Any

from saltus.models.common_layers import llama_attention, llama_decoder, llama_layer, llama_mlp, mixture
from saltus.models.decoder_description import DecoderDescription, Experts, NotDescribed
from saltus.models.gguf_architecture import (
    SOFTMAX,
    GgufArchitecture,
    GgufModel,
    TensorPart,
    check_gates,
    expert_counts,
    expert_tensors,
    llama_config,
    shared_expert_tensors,
)

CLASSES = {"Ernie4_5_MoeForCausalLM"}


def experts(config: Any, layer: int) -> Experts:
    """A mixture, perhaps with shared experts; `moe_norm_min`, the least sum to divide by, is too small to matter."""
    if config.moe_norm_min > 1e-6:
        raise NotDescribed("a sum of scores that is limited from below")
    shared = llama_mlp(config, layer, "mlp.shared_experts") if config.moe_num_shared_experts else None
    bias = f"layers.{layer}.mlp.gate.moe_statics.e_score_correction_bias"
    return mixture(
        config, layer, is_normalized=True, least_sum=config.moe_norm_min, selection_bias=bias, shared=shared
    )  # fmt: skip


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer in range(config.num_hidden_layers):
        is_sparse = (layer + 1) % config.moe_layer_interval == 0
        is_sparse &= config.moe_layer_start_index <= layer <= config.moe_layer_end_index
        mlp = experts(config, layer) if is_sparse else llama_mlp(config, layer)
        mixer = llama_attention(config, layer, rope_interleaved=True)
        layers.append(llama_layer(config, layer, mixer=mixer, mlp=mlp))
    return llama_decoder(config, layers)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    check_gates(model, SOFTMAX)
    counts = expert_counts(model, "moe_num_experts")
    return llama_config(
        model, "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", use_bias="blk.0.attn_q.bias" in model.shapes,
        moe_k=counts.pop("num_experts_per_tok"), moe_num_shared_experts=model.size("expert_shared_count", 0, least=0),
        moe_layer_start_index=model.size("leading_dense_block_count", 0, least=0),
        moe_layer_interval=model.size("interleave_moe_layer_step", 1), **counts,
    )  # fmt: skip


BIAS = TensorPart("mlp.gate.moe_statics.e_score_correction_bias", is_reshaped=True)
TENSORS = expert_tensors() | shared_expert_tensors("mlp.shared_experts") | {"exp_probs_b.bias": BIAS}
GGUF = GgufArchitecture("ernie4_5-moe", gguf_config, TENSORS)
