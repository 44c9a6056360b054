"""Memory of a text's keys and values on a network."""

from __future__ import annotations

from typing import Any

from saltus.core.protocols import Network


def kv_bytes_per_token(network: Network) -> int:
    """Bytes of keys and values that a network keeps for each token of a text: of the target or of a draft model.

    0 for a drafter that has no layers with a cache of their own.
    """
    layers = getattr(network, "context_layers", network)  # of a drafter that runs layers over the target's states
    model: Any = getattr(layers, "model", None)
    if model is None:
        return 0
    config = model.config.get_text_config()
    sizes = [(heads, *_key_and_value_size(config, size)) for heads, size in layer_sizes(config)]
    odd = [size for size in sizes if size != sizes[0]]  # have buffers of their own, besides those of equal layers
    numbers = sum(heads * (key + value) for heads, key, value in [sizes[0]] * len(sizes) + odd)
    return numbers * model.dtype.itemsize


def layer_sizes(config: Any) -> list[tuple[int, int]]:
    """The key and value heads of each layer, and the size of a head. Transformers has them by layer if they differ."""
    if getattr(config, "is_heterogeneous", False):
        return [_layer_sizes(layer) for layer in config.per_layer_config]
    return [_layer_sizes(config)] * config.num_hidden_layers


def _key_and_value_size(config: Any, size: int) -> tuple[int, int]:
    """Of a head; those of latent attention (DeepSeek) as Transformers expands them."""
    unrotated = getattr(config, "qk_nope_head_dim", None)
    key = size if unrotated is None else unrotated + config.qk_rope_head_dim
    return key, getattr(config, "v_head_dim", None) or key


def _layer_sizes(config: Any) -> tuple[int, int]:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if getattr(config, "multi_query", False):
        heads = 1
    return heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
