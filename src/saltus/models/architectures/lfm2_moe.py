"""LFM2 with experts: LFM2's layers, whose MLP is a mixture after the first ones."""

from functools import partial
from typing import Any

from saltus.models.architectures import lfm2
from saltus.models.common_layers import mixture
from saltus.models.decoder_description import MLP, DecoderDescription, Experts
from saltus.models.gguf_architecture import (
    SIGMOID,
    GgufArchitecture,
    GgufModel,
    check_gates,
    expert_counts,
    expert_tensors,
)

CLASSES = {"Lfm2MoeForCausalLM"}


def mlp(config: Any, layer: int) -> MLP | Experts:
    """The MLP or the experts of a layer; these are chosen by sigmoids, perhaps and a bias."""
    if layer < config.num_dense_layers:
        return lfm2.mlp(config, layer)
    path = f"layers.{layer}.feed_forward"
    return mixture(
        config, layer, router=f"{path}.gate", experts=f"{path}.experts", activation="silu", scoring="sigmoid",
        is_normalized=config.norm_topk_prob, least_sum=1e-6, scale=config.routed_scaling_factor,
        selection_bias=f"{path}.expert_bias" if config.use_expert_bias else None,
    )  # fmt: skip


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return lfm2.decoder(config, mlp, partial(lfm2.attention, angles="pos_emb"))


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; llama.cpp's weights of experts always have the sum 1."""
    check_gates(model, SIGMOID)
    return lfm2.lfm2_config(
        model, "lfm2_moe", "Lfm2MoeForCausalLM", num_dense_layers=model.size("leading_dense_block_count", 0, least=0),
        norm_topk_prob=True, routed_scaling_factor=model.number("expert_weights_scale", 0.0) or 1.0,
        use_expert_bias=any(model.layers_with("exp_probs_b.bias")), **expert_counts(model),
    )  # fmt: skip


EXPERTS = expert_tensors("feed_forward.experts", "feed_forward.gate")
TENSORS = {**lfm2.TENSORS, **EXPERTS, "exp_probs_b.bias": "feed_forward.expert_bias"}
GGUF = GgufArchitecture("lfm2moe", gguf_config, TENSORS)
