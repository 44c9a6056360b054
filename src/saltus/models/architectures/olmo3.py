"""OLMo 3: OLMo 2 with windows, and angles of their own for each kind of layer."""

from typing import Any

from saltus.models.architectures import olmo2
from saltus.models.decoder_description import DecoderDescription
from saltus.models.mixer_description import Angles

CLASSES = {"Olmo3ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return olmo2.decoder(
        config,
        [
            olmo2.attention(config, layer, angles=Angles(layer_type=kind))
            for layer, kind in enumerate(config.layer_types)
        ],
    )
