"""Memory of a text's keys and values on a network."""

from __future__ import annotations

import math
from typing import Any

from saltus.core.protocols import Network
from saltus.models.cpu.hybrid_kv_cache import StateSizes


def kv_bytes_per_token(network: Network) -> int:
    """Bytes of keys and values that a network keeps for each token of a text: of the target or of a draft model.

    0 for a drafter that has no layers with a cache of their own.
    """
    if (measured := getattr(network, "kv_bytes_per_token", None)) is not None:
        return measured
    layers = getattr(network, "context_layers", network)  # of a drafter that runs layers over the target's states
    model: Any = getattr(layers, "model", None)
    if model is None:
        return 0
    config = model.config.get_text_config()
    states = state_sizes(network)
    sizes = layer_sizes(config) if states is None else states.attention  # other layers have neither keys nor values
    if not sizes:
        return 0
    odd = [size for size in sizes if size != sizes[0]]  # have buffers of their own, besides those of equal layers
    numbers = len(sizes) * math.prod(sizes[0]) + sum(map(math.prod, odd))
    return 2 * numbers * model.dtype.itemsize


def state_sizes(network: Network) -> StateSizes | None:
    """What recurrent layers of a network keep; None if it has none."""
    return getattr(network, "state_sizes", None)


def text_bytes(network: Network, num_tokens: int) -> int:
    """The most that a text of so many tokens keeps on a network: keys and values, and states (StateSizes.of_text)."""
    states = state_sizes(network)
    return num_tokens * kv_bytes_per_token(network) + (0 if states is None else states.of_text(num_tokens))


def layer_sizes(config: Any) -> list[tuple[int, int]]:
    """The key and value heads of each layer, and the size of a head. Transformers has them by layer if they differ."""
    if getattr(config, "is_heterogeneous", False):
        return [_layer_sizes(layer) for layer in config.per_layer_config]
    return [_layer_sizes(config)] * config.num_hidden_layers


def _layer_sizes(config: Any) -> tuple[int, int]:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
