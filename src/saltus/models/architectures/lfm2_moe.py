"""LFM2 with experts: LFM2's layers, whose MLP is a mixture after the first ones."""

from typing import Any

from saltus.models.architectures import lfm2
from saltus.models.decoder_description import MLP, DecoderDescription, Experts, mixture

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
    return lfm2.decoder(config, mlp, angles="pos_emb")
