"""GLM-4.7-Flash: DeepSeek V3's layers; the configuration says which have experts."""

from typing import Any

from saltus.models.architectures import deepseek_v3
from saltus.models.decoder_description import DecoderDescription

CLASSES = {"Glm4MoeLiteForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return deepseek_v3.decoder(config, [kind == "sparse" for kind in config.mlp_layer_types])
