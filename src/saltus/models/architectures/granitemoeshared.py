"""Granite with a mixture of experts beside a shared one in every layer."""

from dataclasses import replace
from typing import Any

from saltus.models.architectures import granitemoe, granitemoehybrid
from saltus.models.decoder_description import DecoderDescription

CLASSES = {"GraniteMoeSharedForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    whole = granitemoe.describe(config)
    layers = (
        replace(layer, mlp=replace(layer.mlp, shared=granitemoehybrid.shared_mlp(config, number)))
        for number, layer in enumerate(whole.layers)
    )
    return replace(whole, layers=tuple(layers))
