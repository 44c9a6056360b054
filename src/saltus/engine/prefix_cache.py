"""Keep KV caches of finished requests, so that a prompt that continues one of them is not read again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from saltus.models.protocols import TargetNetwork


def supports_prefix_cache(network: TargetNetwork) -> bool:
    """True if a network reads left to right and rounds alike in every call, so that a kept cache changes no text.

    Keys of a model with LongRoPE depend on how long their text may get.
    """
    if getattr(network, "long_rope", None) is not None:
        return False
    return network.model.device.type == "cpu" and network.batch_invariant and not network.any_subset


@dataclass
class PrefixCache:
    """The KV caches of the latest requests, at most `max_entries` of them and `max_bytes` in all.

    The latest one is kept whatever its size. An entry is taken whole, by one text that continues it, such as the next
    turn of a conversation: a prompt that contains the entry's prompt and goes on. `PrefixTree` shares and copies.
    """

    max_entries: int = 4
    max_bytes: int = 2**30
    entries: list[tuple[int, dict[str, Any]]] = field(default_factory=list)  # (length of prompt, caches by network)

    def clear(self) -> None:
        """Forget all entries."""
        self.entries.clear()

    def put(self, prompt: Sequence[int], kv_caches: dict[str, Any]) -> None:
        """Keep the KV caches of a request; drops the oldest entries beyond the limits."""
        if "target" in kv_caches:
            self.entries.append((len(prompt), kv_caches))
        while len(self.entries) > self.max_entries or (len(self.entries) > 1 and self._num_bytes() > self.max_bytes):
            del self.entries[0]

    def _num_bytes(self) -> int:
        return sum(_num_bytes(kv_cache) for _, kv_caches in self.entries for kv_cache in kv_caches.values())

    def take(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Remove and return the entry that shares the longest prefix with the prompt; empty if none qualifies."""
        best, most = None, 0
        for entry in self.entries:
            shared = common_prefix_length(entry[1]["target"].tokens, np.asarray(prompt))
            if shared > max(entry[0], most):
                best, most = entry, shared
        if best is None:
            return {}
        self.entries = [entry for entry in self.entries if entry is not best]
        return best[1]


def _num_bytes(kv_cache: Any) -> int:
    odd = getattr(kv_cache, "odd_layers", {}).values()
    tensors = getattr(kv_cache, "keys", None), getattr(kv_cache, "values", None), *(x for pair in odd for x in pair)
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def common_prefix_length(tokens: np.ndarray, other: np.ndarray) -> int:
    """How many first tokens two texts share."""
    length = min(len(tokens), len(other))
    differs = np.flatnonzero(tokens[:length] != other[:length])
    return int(differs[0]) if len(differs) else length
