"""Keep the keys and values of one text, and drop those of rejected tokens at the next call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from saltus.core.forward import ForwardInputs

MIN_GROWTH = 256  # slots that a buffer grows by, at least


@dataclass
class KVCache:
    """Keys and values of one text: slot i holds token i; for one call the nodes of a tree follow.

    Buffers are [layers, kv_heads, capacity, dim], made when the first layer writes. Layers whose sizes differ from the
    first one's (Gemma 4) have buffers of their own, [kv_heads, capacity, dim]. The values of latent attention are the
    first numbers of its keys; in their place are the keys of an indexer, or nothing.
    """

    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # whose keys and values are kept
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    pending_tree: ForwardInputs | None = None  # evaluated after `tokens`; acceptance is known at the next call
    places: tuple[int, int, int, int, int] | None = field(default=None, init=False)  # see `memory`
    odd_layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, kw_only=True)
    long_angles: bool | None = field(default=None, init=False)  # of LongRoPE, that keys are rotated by

    def forget(self) -> None:
        """Keep the buffers alone."""
        self.tokens, self.pending_tree = self.tokens[:0], None

    def reuse_prefix(self, tokens: np.ndarray, num_recomputed: int = 1) -> int:
        """How many of the decided tokens are in the cache. Keeps the accepted branch, and drops the other nodes.

        The last `num_recomputed` decided tokens do not count: a causal network needs the logits of the last one.
        """
        if self.pending_tree is not None:
            known = len(self.tokens)
            nodes = self.pending_tree.matching_nodes(tokens[known:])
            self._keep_accepted(nodes)
            if nodes:
                self.tokens = np.concatenate([self.tokens, tokens[known : known + len(nodes)]])
            self.pending_tree = None
        shared = min(len(self.tokens), len(tokens) - num_recomputed)
        known, given = self.tokens[:shared], tokens[:shared]
        if known.tobytes() != given.tobytes():
            shared = int((known != given).argmax())
        self.tokens = self.tokens[:shared]
        return shared

    @property
    def num_text_slots(self) -> int:
        """The slots that `tokens` fill; the nodes of the pending tree follow."""
        return len(self.tokens)

    @property
    def bytes_per_token(self) -> int:
        """What a token takes in all buffers, once there are any."""
        pairs = [(self.keys, self.values), *self.odd_layers.values()]
        return sum(each.nbytes // each.shape[-2] for pair in pairs for each in pair if each is not None)

    def of_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of a layer [kv_heads, slots, dim], to be read only; slots after the text hold anything.

        Keys are rotated by their positions.
        """
        if layer in self.odd_layers:
            return self.odd_layers[layer]
        assert self.keys is not None and self.values is not None
        return self.keys[layer], self.values[layer]

    def _keep_accepted(self, nodes: list[int]) -> None:
        """Move the accepted nodes to the slots after the text, unless they are there already."""
        moves = [(slot, node) for slot, node in enumerate(nodes) if slot != node]
        if moves and self.keys is not None and self.values is not None:
            base = self.num_text_slots
            buffers = (self.keys, self.values), *self.odd_layers.values()
            for buffer in (_writable_view(buffer) for pair in buffers for buffer in pair):
                for slot, node in moves:  # a node never moves to a later slot, so none is overwritten before it moves
                    buffer[..., base + slot, :] = buffer[..., base + node, :]

    def reserve(self, num_layers: int, num_slots: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Allocate at least `num_slots` slots, shaped like a layer's new keys and values [kv_heads, rows, dim]."""
        if self.keys is not None and self.values is not None:
            assert self.keys.shape[0] == num_layers, "a KV cache serves one model"
            assert have_sizes_of((self.keys, self.values), (key, value)), "layers differ in size"
        capacity = _larger_capacity(self.keys, num_slots)
        if capacity is not None:
            self.places = None
            self.keys = _resized(self.keys, (num_layers,), capacity, key)
            self.values = _resized(self.values, (num_layers,), capacity, value)

    def memory(
        self, num_layers: int, num_slots: int, new_rows: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[int, int, int, int, int]:
        """Where keys and values begin, their slots, `num_slots` or more, and the bytes between layers of both."""
        if self.places is None or self.places[2] < num_slots:
            self.reserve(num_layers, num_slots, *new_rows)
            assert self.keys is not None and self.values is not None
            keys, values = self.keys, self.values
            key_step, value_step = (x.stride(0) * x.element_size() for x in (keys, values))
            self.places = keys.data_ptr(), values.data_ptr(), keys.shape[-2], key_step, value_step
        return self.places

    def reserve_layer(
        self, layer: int, num_layers: int, num_slots: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers of one layer, of the sizes of its new keys and values and with at least `num_slots` slots."""
        if not 0 <= layer < num_layers:  # of BART's kind, whose configurations count an encoder's
            raise ValueError(f"it has a layer {layer + 1}, but its configuration says {num_layers} layers")
        if self.keys is None or self.values is None or have_sizes_of((self.keys, self.values), (key, value)):
            self.reserve(num_layers, num_slots, key, value)
            assert self.keys is not None and self.values is not None
            return self.keys[layer], self.values[layer]
        return self.reserve_odd_layer(layer, num_slots, key, value)

    def reserve_odd_layer(
        self, layer: int, num_slots: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers of a layer that has its own, with at least `num_slots` slots."""
        keys, values = self.odd_layers.get(layer, (None, None))
        capacity = _larger_capacity(keys, num_slots)
        if capacity is not None:
            self.odd_layers[layer] = _resized(keys, (), capacity, key), _resized(values, (), capacity, value)
        return self.odd_layers[layer]


def have_sizes_of(buffers: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> bool:
    """True if a layer's buffers and its new keys and values have the same heads, head sizes and dtypes."""
    return all(
        old.shape[-3::2] == rows.shape[-3::2] and old.dtype == rows.dtype
        for old, rows in zip(buffers, new, strict=True)
    )


def _larger_capacity(buffer: torch.Tensor | None, num_slots: int) -> int | None:
    """The slots that a buffer should grow to; None if it has enough."""
    capacity = 0 if buffer is None else buffer.shape[-2]
    return None if num_slots <= capacity else max(num_slots, capacity + max(MIN_GROWTH, capacity // 2))


def _writable_view(x: torch.Tensor) -> Any:
    """The same memory, on the CPU as a NumPy array: torch takes several times as long for a few small copies."""
    if x.device.type != "cpu":
        return x
    return (x.view(torch.int16) if x.element_size() == 2 else x).numpy()


def _resized(old: torch.Tensor | None, layers: tuple[int, ...], capacity: int, like: torch.Tensor) -> torch.Tensor:
    heads, _, dim = like.shape
    new = torch.empty(*layers, heads, capacity, dim, dtype=like.dtype, device=like.device)
    if old is not None:
        new[..., : old.shape[-2], :] = old
    return new
