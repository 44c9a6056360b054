"""FlexOlmo: OLMo 2's layers with OLMoE's experts."""

from dataclasses import replace
from typing import Any

from saltus.models.architectures import olmo2
from saltus.models.common_layers import mixture
from saltus.models.decoder_description import DecoderDescription

CLASSES = {"FlexOlmoForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    whole = olmo2.describe(config)
    layers = (
        replace(layer, mlp=mixture(config, number, is_normalized=config.norm_topk_prob))
        for number, layer in enumerate(whole.layers)
    )
    return replace(whole, layers=tuple(layers))
