"""The text of North Vision (Cohere Compass): Cohere 2's layers, with angles of each kind of layers, if it has any."""

from dataclasses import replace
from typing import Any

from saltus.models.architectures import cohere2
from saltus.models.common_layers import llama_attention, llama_mlp
from saltus.models.decoder_description import DecoderDescription, Layer
from saltus.models.mixer_description import Angles, Norm

CLASSES = {"CohereCompassForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for number, kind in enumerate(config.layer_types):
        angles = None if config.rope_parameters[kind] is None else Angles(layer_type=kind)
        norm = Norm(f"layers.{number}.input_layernorm", config.layer_norm_eps, "layer")
        mixer = llama_attention(config, number, angles=angles)
        layers.append(Layer(mixer, llama_mlp(config, number), norm, norm, parallel=True))
    return replace(cohere2.decoder(config, layers), logit_scale=config.logit_scale or 1.0)
