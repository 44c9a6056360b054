"""Granite with a mixture of experts in every layer."""

from dataclasses import replace
from typing import Any

from saltus.models.architectures import granite
from saltus.models.decoder_description import DecoderDescription, mixture

CLASSES = {"GraniteMoeForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    plain = granite.describe(config)
    layers = []
    for number, layer in enumerate(plain.layers):
        path = f"layers.{number}.block_sparse_moe"
        experts = mixture(config, number, router=f"{path}.router", experts=f"{path}.experts", is_normalized=True)
        layers.append(replace(layer, mlp=experts))
    return replace(plain, layers=tuple(layers))
