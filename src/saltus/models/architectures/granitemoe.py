"""Granite with a mixture of experts in every layer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from saltus.models.architectures import granite, granitemoehybrid
from saltus.models.common_layers import mixture
from saltus.models.decoder_description import MLP, DecoderDescription
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel

CLASSES = {"GraniteMoeForCausalLM"}


def decoder(config: Any, shared: Callable[[Any, int], MLP | None] = lambda config, layer: None) -> DecoderDescription:
    """Granite with experts, beside what is shared in a layer."""
    plain = granite.describe(config)
    layers = []
    for number, layer in enumerate(plain.layers):
        path = f"layers.{number}.block_sparse_moe"
        experts = mixture(
            config, number, router=f"{path}.router", experts=f"{path}.experts", is_normalized=True,
            shared=shared(config, number),
        )  # fmt: skip
        layers.append(replace(layer, mlp=experts))
    return replace(plain, layers=tuple(layers))


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return decoder(config)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; models with a shared expert are Granite 4's, all of whose layers are attention."""
    if any(model.layers_with("ffn_up_shexp.weight")):
        return granitemoehybrid.gguf_config(model)
    top = model.size("expert_used_count")
    return granite.granite_config(
        model, "granitemoe", "GraniteMoeForCausalLM", num_local_experts=model.size("expert_count"),
        num_experts_per_tok=top,
    )  # fmt: skip


GGUF = GgufArchitecture("granitemoe", gguf_config, granitemoehybrid.EXPERT_TENSORS, interleaves_heads=True)
