"""Granite with windows, attention sinks, and angles by layer."""

from dataclasses import replace
from typing import Any

from saltus.models.architectures import granite, granitemoehybrid
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, layer_types, num_layers
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


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; files with experts are of the type granitemoe_swa. All angles have one theta."""
    layers, theta = num_layers(model), model.number("rope.freq_base", 10000.0)
    rotated = [bool(each) for each in model.get("attention.rope_pattern", [True] * layers)]
    if len(rotated) != layers:
        raise ValueError(f"it says of {len(rotated):,} layers whether they are rotated, but has {layers:,}")
    settings: dict[str, Any] = {
        "layer_types": layer_types(model, 1), "sliding_window": model.size("attention.sliding_window"),
        "layer_rope_theta": [theta if each else 0 for each in rotated],
    }  # fmt: skip
    if not model.get("expert_count"):
        return granite.granite_config(model, "granite_swa", "GraniteSWAForCausalLM", **settings)
    return granite.granite_config(
        model, "granitemoe_swa", "GraniteMoeSWAForCausalLM", num_local_experts=model.size("expert_count"),
        num_experts_per_tok=model.size("expert_used_count"),
        shared_intermediate_size=model.size("expert_shared_feed_forward_length", 0, least=0), **settings,
    )  # fmt: skip


TENSORS = {
    **granitemoehybrid.EXPERT_TENSORS,
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_up_shexp.weight": granitemoehybrid.SHARED,  # with the gate
}
GGUF = GgufArchitecture("granite-swa", gguf_config, TENSORS, interleaves_heads=True)
