"""Keep keys and values of read texts by their prefixes, so that a text that begins like another is not read again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saltus.engine.prefix_path import (
    Node,
    Path,
    Snapshot,
    copy,
    cut,
    find_path,
    joined,
    num_tokens,
    snapshots_along,
    split,
)
from saltus.engine.whole_caches import WholeCaches
from saltus.models.cpu.hybrid_kv_cache import HybridKVCache, StateSizes
from saltus.models.cpu.kv_cache import MIN_GROWTH, KVCache
from saltus.models.cuda.kv_pages import FixedShapeKVCache, KVPagePool
from saltus.models.cuda.state_pages import StateKVCache
from saltus.models.protocols import TargetNetwork

MAX_NODE_TOKENS = 512  # where a text leaves another one inside a node, the node is copied, and all texts wait meanwhile


def supports_prefix_tree(network: TargetNetwork) -> bool:
    """True if a network reads left to right and rounds alike in every call, so that a kept cache changes no text.

    Keys of a model with LongRoPE depend on how long their text may get.
    """
    if getattr(network, "long_rope", None) is not None:
        return False
    runner = getattr(network, "fixed_shape_runner", None)
    if runner is not None:  # fixed shapes alone read prompts from their beginning
        return runner.decoder is not None
    return network.model.device.type == "cpu" and network.batch_invariant and not network.any_subset


Reader = Callable[[slice], tuple[Tensor, Tensor]]
"""A copy of the keys and values, [layers, kv_heads, tokens, dim], of some tokens of a cache."""


@dataclass
class PrefixTree:
    """A radix tree over the tokens that networks have read, at most `max_bytes` of keys and values in all.

    A text takes a copy of the longest prefix that the tree has, so any number of texts may share it. The ends of the
    tree that were not used for longest are dropped first, and of a text too long for it the beginning is kept. For
    networks for which `supports_prefix_tree` is true.

    Where recurrent layers keep states, a text takes the prefix up to a snapshot of these. They take half of the memory
    at most, without copies of their own: they are never written to.

    Caches in pages of a GPU give copies, which stay on the GPU.

    KV caches that cannot be cut in pieces (EvaByte's; on a CPU of layers of different sizes; on a GPU with states) are
    kept whole, the latest four, and taken whole by one text: one that begins with all of the kept text's prompt, such
    as the next turn of a conversation.
    """

    max_bytes: int = 2**30
    _roots: dict[str, Node] = field(default_factory=dict, init=False)  # by network, as the next two
    _pools: dict[str, KVPagePool] = field(default_factory=dict, init=False)  # where caches have pages
    _state_sizes: dict[str, StateSizes] = field(default_factory=dict, init=False)  # where they have states
    # All nodes but the roots, those first that were not used for longest. A use moves children before their parents to
    # the end, so that the first node of all is always an end of the tree.
    _nodes_by_use: OrderedDict[Node, None] = field(default_factory=OrderedDict, init=False, repr=False)
    _node_bytes: int = field(default=0, init=False)
    _snapshots_by_use: OrderedDict[Snapshot, None] = field(default_factory=OrderedDict, init=False, repr=False)
    _snapshot_bytes: int = field(default=0, init=False)
    _whole: WholeCaches = field(default_factory=WholeCaches, init=False, repr=False)

    @property
    def num_bytes(self) -> int:
        """Of all that is kept."""
        return self._node_bytes + self._snapshot_bytes + self._whole.num_bytes

    def clear(self) -> None:
        """Forget everything."""
        for kept in (self._roots, self._pools, self._nodes_by_use, self._snapshots_by_use, self._whole):
            kept.clear()
        self._node_bytes = self._snapshot_bytes = 0

    def take(
        self, prompt: Sequence[int], networks: Collection[str] | None = None, max_tokens: int | None = None
    ) -> dict[str, Any]:
        """New KV caches by network, filled with the longest known prefix of the prompt; empty if none is known.

        With `networks` of these alone: a copy for a network that does not read the text would be memory for nothing.
        With `max_tokens` those that can be cut have no more tokens, and room for the others, which `extend` copies.
        """
        tokens, taken = np.asarray(prompt, dtype=np.int64), {}
        for name, root in self._roots.items():
            if networks is None or name in networks:
                path = find_path(root, tokens)
                self._touch(path)
                if (kv_cache := self._copied(name, path, len(tokens) + MIN_GROWTH, max_tokens)) is not None:
                    taken[name] = kv_cache
        for name in self._whole.network_names - taken.keys():
            if (networks is None or name in networks) and (kv_cache := self._whole.take(name, tokens)) is not None:
                taken[name] = kv_cache
        return taken

    def _copied(self, name: str, path: Path, capacity: int, max_tokens: int | None) -> Any:
        """A new cache of the tokens of a path, as far as it can continue them; None if it cannot."""
        if not path:
            return None
        if name in self._state_sizes:
            return self._copied_with_states(name, path, capacity)
        if (pool := self._pools.get(name)) is not None:
            kv_cache = FixedShapeKVCache(pool)
            kv_cache.fill(*joined(path, 0))
            return kv_cache
        return KVCache(*joined(path if max_tokens is None else cut(path, max_tokens), capacity))

    def _copied_with_states(self, name: str, path: Path, capacity: int) -> HybridKVCache | None:
        """A new cache of a path up to its last snapshot; None if there is none."""
        known = snapshots_along(path)
        if not known:
            return None
        position, last = max(known.items())
        self._snapshots_by_use.move_to_end(last)
        return HybridKVCache(
            *joined(cut(path, position), capacity), sizes=self._state_sizes[name], num_read=position,
            snapshots={at: snapshot.states for at, snapshot in known.items()},
        )  # fmt: skip

    @torch.inference_mode()  # a call may have made the buffers
    def extend(self, prompt: Sequence[int], kv_caches: Mapping[str, Any], max_tokens: int) -> None:
        """Copy what is known of the next `max_tokens` tokens of a prompt into caches that `take` has begun with."""
        tokens = np.asarray(prompt, dtype=np.int64)
        for name, kv_cache in kv_caches.items():
            if name not in self._roots or type(kv_cache) is not KVCache or kv_cache.keys is None:
                continue
            assert kv_cache.values is not None
            begin = len(kv_cache.tokens)
            path = cut(find_path(self._roots[name], tokens), min(begin + max_tokens, kv_cache.keys.shape[2]))
            if (end := num_tokens(path)) > begin:
                self._touch(path)
                copy(path, begin, kv_cache.keys, kv_cache.values)
                kv_cache.tokens = tokens[:end].copy()

    def put(self, prompt: Sequence[int], kv_caches: Mapping[str, Any], ended: bool = True) -> None:
        """Copy what the KV caches of a text have and the tree has not.

        Where a text has `ended`, its caches that cannot be cut are kept themselves.
        """
        for name, kv_cache in kv_caches.items():
            if not _is_filled(kv_cache):
                continue
            if isinstance(kv_cache, HybridKVCache) and not kv_cache.odd_layers:
                self._add_with_snapshots(name, kv_cache, ended)
            elif isinstance(kv_cache, FixedShapeKVCache) and not isinstance(kv_cache, StateKVCache):
                self._pools[name] = kv_cache.pool
                self._add(name, kv_cache.tokens, kv_cache.read)
            elif type(kv_cache) is KVCache and not kv_cache.odd_layers:
                self._add(name, kv_cache.tokens, _reader(kv_cache))
            elif ended:
                self._whole.keep(name, kv_cache, len(prompt))
        self._make_room()

    def _make_room(self) -> None:
        """Drop what there is no room for, the oldest first."""
        while self._whole.num_bytes and self.num_bytes > self.max_bytes:
            self._whole.drop_oldest()
        while self._snapshots_by_use and self._snapshot_bytes > self.max_bytes // 2:
            self._drop_snapshot(next(iter(self._snapshots_by_use)))
        while self._nodes_by_use and self.num_bytes > self.max_bytes:
            self._drop_oldest_end()

    def _add(self, name: str, tokens: np.ndarray, read: Reader) -> None:
        """Add tokens, whose keys and values `read` copies; not those that there is no room for even alone."""
        if name not in self._roots:
            self._roots[name] = Node(tokens[:0].copy(), *read(slice(0, 0)), None)
        node = self._roots[name]
        tokens = tokens[: (self.max_bytes - self._snapshot_bytes) // max(node.bytes_per_token, 1)]
        path, added = find_path(node, tokens), []
        known = num_tokens(path)
        if path and known < len(tokens):
            node, shared = path[-1]
            if shared < len(node.tokens):
                self._nodes_by_use[split(node, shared)] = None
        for begin in range(known, len(tokens), MAX_NODE_TOKENS):
            new = slice(begin, min(begin + MAX_NODE_TOKENS, len(tokens)))
            end = Node(tokens[new].copy(), *read(new), node)
            node.children[int(tokens[begin])] = end
            self._node_bytes += end.num_bytes
            added.append(end)
            node = end
        self._nodes_by_use |= dict.fromkeys(reversed(added))
        self._touch(path)

    def _add_with_snapshots(self, name: str, kv_cache: HybridKVCache, ended: bool) -> None:
        """Add a text up to its last snapshot; a text that has ended gives its states away as one."""
        given = dict(kv_cache.snapshots)
        if ended and kv_cache.num_read == len(kv_cache.tokens) and not kv_cache.in_call:
            given.setdefault(kv_cache.num_read, kv_cache.states)
        if not given:
            return
        self._state_sizes[name] = kv_cache.sizes
        tokens = kv_cache.tokens[: max(given)]
        self._add(name, tokens, _reader(kv_cache))
        end = 0
        for node, shared in find_path(self._roots[name], tokens):
            begin, end = end, end + shared
            for place in (position - begin for position in given if begin < position <= end):
                if place not in node.snapshots:
                    node.snapshots[place] = snapshot = Snapshot(given[begin + place], node, place)
                    self._snapshots_by_use[snapshot] = None
                    self._snapshot_bytes += snapshot.states.nbytes

    def _touch(self, path: Path) -> None:
        """Note that the nodes of a path are used now."""
        for node, _ in reversed(path):
            self._nodes_by_use.move_to_end(node)

    def _drop_snapshot(self, snapshot: Snapshot) -> None:
        del self._snapshots_by_use[snapshot], snapshot.node.snapshots[snapshot.place]
        self._snapshot_bytes -= snapshot.states.nbytes

    def _drop_oldest_end(self) -> None:
        oldest, _ = self._nodes_by_use.popitem(last=False)
        assert oldest.parent is not None and not oldest.children
        for snapshot in list(oldest.snapshots.values()):
            self._drop_snapshot(snapshot)
        del oldest.parent.children[int(oldest.tokens[0])]
        self._node_bytes -= oldest.num_bytes


def _is_filled(kv_cache: Any) -> bool:
    """True for a cache of keys, values or states with tokens; networks of drafters may have others."""
    if isinstance(kv_cache, KVCache):
        return kv_cache.keys is not None and len(kv_cache.tokens) > 0
    return isinstance(kv_cache, FixedShapeKVCache) and len(kv_cache.tokens) > 0


def _reader(kv_cache: KVCache) -> Reader:
    keys, values = kv_cache.keys, kv_cache.values
    assert keys is not None and values is not None
    return lambda span: (keys[:, :, span].clone(), values[:, :, span].clone())
