"""Keep the keys and values of one text, and drop those of rejected tokens at the next call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from saltus.core.forward import ForwardInputs

MIN_GROWTH = 256  # slots that a buffer grows by, at least


@dataclass
class KVCache:
    """Keys and values of one text: slot i holds token i; for one call the nodes of a tree follow.

    Buffers are [layers, kv_heads, capacity, dim], made when the first layer writes.
    """

    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # whose keys and values are kept
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    pending_tree: ForwardInputs | None = None  # evaluated after `tokens`; acceptance is known at the next call

    def reuse_prefix(self, tokens: np.ndarray, num_recomputed: int = 1) -> int:
        """How many of the decided tokens are in the cache. Keeps the accepted branch, and drops the other nodes.

        The last `num_recomputed` decided tokens do not count: a causal network needs the logits of the last one.
        """
        if self.pending_tree is not None:
            nodes = self.pending_tree.match_tokens(tokens[len(self.tokens) :])
            self._keep_accepted(nodes)
            accepted = np.array([self.pending_tree.tokens[node] for node in nodes], dtype=np.int64)
            self.tokens = np.concatenate([self.tokens, accepted])
            self.pending_tree = None
        shared = min(len(self.tokens), len(tokens) - num_recomputed)
        differs = np.flatnonzero(self.tokens[:shared] != tokens[:shared])
        self.tokens = self.tokens[: differs[0] if len(differs) else shared]
        return len(self.tokens)

    @property
    def num_text_slots(self) -> int:
        """The slots that `tokens` fill; the nodes of the pending tree follow."""
        return len(self.tokens)

    def _keep_accepted(self, nodes: list[int]) -> None:
        """Move the accepted nodes to the slots after the text, unless they are there already."""
        moves = [(slot, node) for slot, node in enumerate(nodes) if slot != node]
        if moves and self.keys is not None and self.values is not None:
            base = self.num_text_slots
            for buffer in map(_writable_view, (self.keys, self.values)):
                for slot, node in moves:  # a node never moves to a later slot, so none is overwritten before it moves
                    buffer[:, :, base + slot] = buffer[:, :, base + node]

    def reserve(self, num_layers: int, num_slots: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Allocate at least `num_slots` slots, shaped like a layer's new keys and values [kv_heads, rows, dim]."""
        capacity = 0 if self.keys is None else self.keys.shape[2]
        if num_slots <= capacity:
            return
        capacity = max(num_slots, capacity + max(MIN_GROWTH, capacity // 2))
        self.keys = _resized(self.keys, num_layers, capacity, key)
        self.values = _resized(self.values, num_layers, capacity, value)


def _writable_view(x: torch.Tensor) -> Any:
    """The same memory, on the CPU as a NumPy array: torch takes several times as long for a few small copies."""
    if x.device.type != "cpu":
        return x
    return (x.view(torch.int16) if x.element_size() == 2 else x).numpy()


def _resized(old: torch.Tensor | None, layers: int, capacity: int, like: torch.Tensor) -> torch.Tensor:
    heads, _, dim = like.shape
    new = torch.empty(layers, heads, capacity, dim, dtype=like.dtype, device=like.device)
    if old is not None:
        new[:, :, : old.shape[2]] = old
    return new
