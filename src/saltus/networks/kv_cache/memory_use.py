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
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim * model.dtype.itemsize
