"""ERNIE 4.5 with experts: chosen by softmax and a bias, beside shared ones; interleaved rotary embeddings."""

from typing import Any

from saltus.models.decoder_description import (
    DecoderDescription,
    Experts,
    llama_attention,
    llama_decoder,
    llama_layer,
    llama_mlp,
    mixture,
)

CLASSES = {"Ernie4_5_MoeForCausalLM"}


def experts(config: Any, layer: int) -> Experts:
    """A mixture, perhaps with shared experts."""
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
