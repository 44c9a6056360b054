"""Granite with a mixture of experts beside a shared one in every layer."""

from typing import Any

from saltus.models.architectures import granitemoe, granitemoehybrid
from saltus.models.decoder_description import DecoderDescription

CLASSES = {"GraniteMoeSharedForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return granitemoe.decoder(config, granitemoehybrid.shared_mlp)
