"""Granite with windows, attention sinks, and angles by layer."""

from dataclasses import replace
from typing import Any

from saltus.models.architectures import granite
from saltus.models.decoder_description import DecoderDescription
from saltus.models.mixer_description import Angles, Attention

CLASSES = {"GraniteSWAForCausalLM"}


def with_sinks(config: Any, whole: DecoderDescription) -> DecoderDescription:
    """Granite's layers with sinks, each with the angles of its theta; a theta of 0 is none."""
    thetas, layers = sorted({theta for theta in config.layer_rope_theta if theta}), []
    for number, (theta, layer) in enumerate(zip(config.layer_rope_theta, whole.layers, strict=True)):
        angles = Angles(f"rotary_embs.{thetas.index(theta)}") if theta else None
        assert isinstance(layer.mixer, Attention)
        mixer = replace(layer.mixer, angles=angles, sinks=f"layers.{number}.self_attn.sinks")
        layers.append(replace(layer, mixer=mixer))
    return replace(whole, layers=tuple(layers))


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return with_sinks(config, granite.describe(config))
