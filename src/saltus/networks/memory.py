"""Remember what a network has read of one text, and forget by itself what the text no longer says."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from saltus.core.forward import Forward

GROWTH = 256  # slots that a buffer grows by, at least


@dataclass
class Memory:
    """Keys and values of one text: slot i holds token i; behind them, for one call, stand the nodes of a tree.

    Buffers are [layers, kv_heads, capacity, dim], made when the first layer writes.
    """

    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # read and kept
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    tree: Forward | None = None  # evaluated behind `tokens`, not yet known to be text

    def recall(self, decided: np.ndarray, again: int = 1) -> int:
        """How many of the decided tokens need not be read again. Keeps the branch that became text, in place.

        The last `again` decided tokens are always read: of a causal network the last one's logits are wanted.
        """
        if self.tree is not None:
            nodes = self.tree.follow(decided[len(self.tokens) :])
            self._keep(nodes)
            kept = np.array([self.tree.tokens[node] for node in nodes], dtype=np.int64)
            self.tokens = np.concatenate([self.tokens, kept])
            self.tree = None
        shared = min(len(self.tokens), len(decided) - again)
        differs = np.flatnonzero(self.tokens[:shared] != decided[:shared])
        self.tokens = self.tokens[: differs[0] if len(differs) else shared]
        return len(self.tokens)

    def _keep(self, nodes: list[int]) -> None:
        """Move the accepted nodes to the slots right behind the text; a trunk stands there already."""
        moves = [(slot, node) for slot, node in enumerate(nodes) if slot != node]
        if moves and self.keys is not None and self.values is not None:
            base = len(self.tokens)
            to, at = (torch.tensor([base + x for x in column]) for column in zip(*moves, strict=True))
            for buffer in (self.keys, self.values):
                buffer[:, :, to] = buffer[:, :, at]

    def reserve(self, layers: int, slots: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Make room for `slots` slots, shaped like a layer's new keys and values [kv_heads, rows, dim]."""
        capacity = 0 if self.keys is None else self.keys.shape[2]
        if slots <= capacity:
            return
        capacity = max(slots, capacity + max(GROWTH, capacity // 2))
        self.keys = _grown(self.keys, layers, capacity, key)
        self.values = _grown(self.values, layers, capacity, value)


def _grown(old: torch.Tensor | None, layers: int, capacity: int, like: torch.Tensor) -> torch.Tensor:
    heads, _, dim = like.shape
    new = torch.empty(layers, heads, capacity, dim, dtype=like.dtype, device=like.device)
    if old is not None:
        new[:, :, : old.shape[2]] = old
    return new
