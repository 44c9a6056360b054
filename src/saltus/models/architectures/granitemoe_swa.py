"""The same with a mixture of experts in every layer, perhaps beside a shared one."""

from typing import Any

from saltus.models.architectures import granite_swa, granitemoeshared
from saltus.models.decoder_description import DecoderDescription

CLASSES = {"GraniteMoeSWAForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return granite_swa.with_sinks(config, granitemoeshared.describe(config))
