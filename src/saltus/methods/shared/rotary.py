"""Rotary position embeddings of published drafters, whose settings stand in several forms in their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from saltus.models.packed_decoder import ROPE_TYPES, DecoderConfig, RotaryEmbedding

STATIC_TYPES = {*ROPE_TYPES, "llama3", "yarn"}  # angles depend on the position alone
TEXT_SECTIONS = {"mrope"}  # axes of images: in a text they have the same positions


def rope_parameters(layers: Mapping[str, Any], default_theta: float = 10000.0) -> dict[str, Any]:
    """Transformers' `rope_parameters` of a config.json: as such, or as `rope_theta` beside `rope_scaling`."""
    given = dict(layers.get("rope_parameters") or layers.get("rope_scaling") or {})
    kind = given.get("rope_type", given.pop("type", "default"))
    given["rope_type"] = "default" if kind in TEXT_SECTIONS else kind
    given["rope_theta"] = float(given.get("rope_theta") or layers.get("rope_theta") or default_theta)
    return given


def unsupported_rope(rope: Mapping[str, Any], layers: Mapping[str, Any]) -> str:
    """What these parameters have that is not computed; empty if nothing."""
    part = rope.get("partial_rotary_factor") or layers.get("partial_rotary_factor") or 1.0
    if part != 1.0:
        return "rotary embeddings of a part of each head"
    return "" if rope["rope_type"] in STATIC_TYPES else f"rotary embeddings of the type {rope['rope_type']}"


def rotary_embedding(config: DecoderConfig) -> Any:
    """The module for a configuration with `rope_parameters`, of a type in STATIC_TYPES."""
    rope = config.rope_parameters
    if rope["rope_type"] in ROPE_TYPES:
        return RotaryEmbedding(config)
    from transformers import LlamaConfig  # seconds to import
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=config.hidden_size, num_attention_heads=config.num_attention_heads, head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings, rope_parameters=dict(rope),
        )
    )  # fmt: skip
