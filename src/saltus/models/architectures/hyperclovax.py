"""HyperCLOVA X: Granite's layers, perhaps with norms of outputs; logits are multiplied by their scale."""

from dataclasses import replace
from typing import Any

from saltus.models.architectures import granite
from saltus.models.decoder_description import DecoderDescription
from saltus.models.mixer_description import Norm

CLASSES = {"HyperCLOVAXForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    whole = granite.describe(config)
    layers = [
        replace(
            layer, mixer_output_norm=Norm(f"layers.{number}.post_norm1", config.rms_norm_eps),
            mlp_output_norm=Norm(f"layers.{number}.post_norm2", config.rms_norm_eps),
        ) if config.use_post_norm else layer
        for number, layer in enumerate(whole.layers)
    ]  # fmt: skip
    return replace(whole, layers=tuple(layers), logit_scale=config.logits_scaling)
