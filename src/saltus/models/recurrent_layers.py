"""Say which layers of a model keep a state in place of keys and values, or attend to other keys than all of them."""

from __future__ import annotations

from typing import Any

from saltus.models.architectures import describe_decoder
from saltus.models.decoder_description import mixers_of
from saltus.models.mixer_description import Attention, LatentAttention

STATELESS = {"mlp", "moe"}  # kinds of layers without a mixer
OTHER_KEYS = {  # kinds of layers that choose keys, or make new ones of several tokens
    "compressed_sparse_attention", "heavily_compressed_attention", "indexed_attention", "minimax_m3_sparse",
    "reference_sliding_attention", "window_attention",
}  # fmt: skip


def kinds_of_layers(model: Any) -> set[str]:
    """As the configuration names them; empty if it does not."""
    config = model.config.get_text_config()
    names = ("layer_types", "layers_block_type")
    return {kind for name in names for kind in getattr(config, name, None) or ()}


def other_key_types(model: Any) -> list[str]:
    """Kinds of layers that choose keys or make new ones, as the configuration names them."""
    return sorted(kinds_of_layers(model) & OTHER_KEYS)


def chooses_keys(model: Any) -> bool:
    """True for a described model whose layers choose keys, which our kernels alone do for a tree."""
    return bool(other_key_types(model)) and describe_decoder(model) is not None


def recurrent_layer_types(model: Any) -> list[str]:
    """Kinds of such layers, as the configuration or the description names them; empty: the model keeps no state."""
    kinds = kinds_of_layers(model) - STATELESS - OTHER_KEYS
    named = sorted(kind for kind in kinds if "attention" not in kind or "linear" in kind)
    description = describe_decoder(model)
    if named or description is None:
        return named
    mixers = [mixer for layer in description.layers for mixer, _ in mixers_of(layer)]
    return sorted({type(mixer).__name__ for mixer in mixers if not isinstance(mixer, Attention | LatentAttention)})
