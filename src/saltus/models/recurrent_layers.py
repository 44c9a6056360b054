"""Say which layers of a model keep a state in place of keys and values."""

from __future__ import annotations

from typing import Any

from saltus.models.architectures import describe_decoder
from saltus.models.decoder_description import Attention, LatentAttention, mixers_of

STATELESS = {"mlp", "moe"}  # kinds of layers without a mixer


def recurrent_layer_types(model: Any) -> list[str]:
    """Kinds of such layers, as the configuration or the description names them; empty: the model keeps no state."""
    config = model.config.get_text_config()
    kinds: set[str] = set(getattr(config, "layer_types", None) or ()) | set(
        getattr(config, "layers_block_type", None) or ()
    )
    kinds -= STATELESS
    named = sorted(kind for kind in kinds if "attention" not in kind or "linear" in kind)
    description = describe_decoder(model)
    if named or description is None:
        return named
    mixers = [mixer for layer in description.layers for mixer, _ in mixers_of(layer)]
    return sorted({type(mixer).__name__ for mixer in mixers if not isinstance(mixer, Attention | LatentAttention)})
