"""Youtu: DeepSeek V3's latent attention, and no experts."""

from typing import Any

from saltus.models.architectures import deepseek_v3
from saltus.models.decoder_description import DecoderDescription

CLASSES = {"YoutuForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return deepseek_v3.decoder(config, [False] * config.num_hidden_layers)
