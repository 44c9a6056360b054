"""VaultGemma: Gemma 2 without norms of outputs."""

from dataclasses import replace
from typing import Any

from saltus.models.architectures import gemma2
from saltus.models.decoder_description import DecoderDescription

CLASSES = {"VaultGemmaForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    whole = gemma2.describe(config)
    layers = (replace(layer, mixer_output_norm=None, mlp_output_norm=None) for layer in whole.layers)
    return replace(whole, layers=tuple(layers))
