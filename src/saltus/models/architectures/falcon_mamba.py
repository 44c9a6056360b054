"""Falcon Mamba: Mamba's layers, with norms without weights of steps, B and C."""

from typing import Any

from saltus.models.architectures import mamba
from saltus.models.decoder_description import DecoderDescription
from saltus.models.mixer_description import Norm

CLASSES = {"FalconMambaForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    norm = Norm(None, config.mixer_rms_eps)
    return mamba.decoder(config, (norm, norm, norm))
