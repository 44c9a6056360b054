"""Keep keys and values of read texts by their prefixes, so that a text that begins like another is not read again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from saltus.models.cpu.kv_cache import MIN_GROWTH, KVCache
from saltus.models.protocols import TargetNetwork

MAX_WHOLE_CACHES = 4


def supports_prefix_tree(network: TargetNetwork) -> bool:
    """True if a network reads left to right and rounds alike in every call, so that a kept cache changes no text.

    Keys of a model with LongRoPE depend on how long their text may get.
    """
    if getattr(network, "long_rope", None) is not None:
        return False
    return network.model.device.type == "cpu" and network.batch_invariant and not network.any_subset


@dataclass(eq=False)
class _Node:
    """A run of tokens after its parent's, with the keys and values of exactly these tokens."""

    tokens: np.ndarray
    keys: Tensor  # [layers, kv_heads, tokens, dim]
    values: Tensor
    parent: _Node | None
    children: dict[int, _Node] = field(default_factory=dict)  # by first token

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


@dataclass
class PrefixTree:
    """A radix tree over the tokens that networks have read, at most `max_bytes` of keys and values in all.

    A text takes a copy of the longest prefix that the tree has, so any number of texts may share it. The ends of the
    tree that were not used for longest are dropped first. For networks for which `supports_prefix_tree` is true.

    KV caches that cannot be cut in pieces (EvaByte's, and those whose layers differ in size) are kept whole, the latest
    four, and taken whole by one text: one that begins with all of the kept text's prompt, such as the next turn of a
    conversation.
    """

    max_bytes: int = 2**30
    num_bytes: int = field(default=0, init=False)
    _roots: dict[str, _Node] = field(default_factory=dict, init=False)  # by network
    _whole: list[tuple[str, int, KVCache]] = field(default_factory=list, init=False)  # network, prompt's length, cache
    # All nodes but the roots, those first that were not used for longest. A use moves children before their parents to
    # the end, so that the first node of all is always an end of the tree.
    _by_use: OrderedDict[_Node, None] = field(default_factory=OrderedDict, init=False, repr=False)

    def clear(self) -> None:
        """Forget everything."""
        self._roots.clear()
        self._by_use.clear()
        self._whole.clear()
        self.num_bytes = 0

    def take(self, prompt: Sequence[int], networks: Collection[str] | None = None) -> dict[str, Any]:
        """New KV caches by network, filled with the longest known prefix of the prompt; empty if none is known.

        With `networks` of these alone: a copy for a network that does not read the text would be memory for nothing.
        """
        tokens, taken = np.asarray(prompt, dtype=np.int64), {}
        for name, root in self._roots.items():
            if networks is not None and name not in networks:
                continue
            path = self._path(root, tokens)
            self._touch(path)
            if path:
                taken[name] = _joined(path, len(tokens) + MIN_GROWTH)
        for name in {name for name, *_ in self._whole} - set(taken):
            if (networks is None or name in networks) and (kv_cache := self._take_whole(name, tokens)) is not None:
                taken[name] = kv_cache
        return taken

    def _take_whole(self, name: str, tokens: np.ndarray) -> KVCache | None:
        """The kept whole cache that shares most with a prompt, cut to what it shares; it is no longer kept."""
        best, most = None, 0
        for entry in self._whole:
            shared = common_prefix_length(entry[2].tokens, tokens)
            if entry[0] == name and shared >= max(entry[1], most + 1):
                best, most = entry, shared
        if best is None:
            return None
        self._whole = [entry for entry in self._whole if entry is not best]
        self.num_bytes -= _num_bytes(best[2])
        best[2].reuse_prefix(tokens, 0)
        return best[2]

    def put(self, prompt: Sequence[int], kv_caches: Mapping[str, Any], ended: bool = True) -> None:
        """Copy what the KV caches of a text have and the tree has not.

        Where a text has `ended`, its caches that cannot be cut are kept themselves.
        """
        for name, kv_cache in kv_caches.items():
            if not isinstance(kv_cache, KVCache) or kv_cache.keys is None or not len(kv_cache.tokens):
                continue
            if type(kv_cache) is KVCache and not kv_cache.odd_layers:
                self._add(name, kv_cache)
            elif ended:
                self._whole.append((name, len(prompt), kv_cache))
                self.num_bytes += _num_bytes(kv_cache)
        while self._whole and (len(self._whole) > MAX_WHOLE_CACHES or self.num_bytes > self.max_bytes):
            self.num_bytes -= _num_bytes(self._whole.pop(0)[2])
        while self.num_bytes > self.max_bytes and self._by_use:
            self._drop_oldest_end()

    def _path(self, root: _Node, tokens: np.ndarray) -> list[tuple[_Node, int]]:
        """The nodes along the tokens, and how many of each node's tokens agree."""
        path, node, at = [], root, 0
        while at < len(tokens) and (child := node.children.get(int(tokens[at]))) is not None:
            shared = common_prefix_length(child.tokens, tokens[at:])
            path.append((child, shared))
            at += shared
            if shared < len(child.tokens):
                break
            node = child
        return path

    def _add(self, name: str, kv_cache: KVCache) -> None:
        tokens, keys, values = kv_cache.tokens, kv_cache.keys, kv_cache.values
        assert keys is not None and values is not None
        if name not in self._roots:
            nothing = keys[:, :, :0].clone()
            self._roots[name] = _Node(tokens[:0].copy(), nothing, nothing, None)
        path = self._path(self._roots[name], tokens)
        node, known = self._roots[name], sum(shared for _, shared in path)
        if known < len(tokens):
            if path:
                node, shared = path[-1]
                if shared < len(node.tokens):
                    self._by_use[_split(node, shared)] = None
            new = slice(known, len(tokens))
            end = _Node(tokens[new].copy(), keys[:, :, new].clone(), values[:, :, new].clone(), node)
            node.children[int(tokens[known])] = end
            self.num_bytes += end.num_bytes
            self._by_use[end] = None
        self._touch(path)

    def _touch(self, path: Sequence[tuple[_Node, int]]) -> None:
        """Note that the nodes of a path are used now."""
        for node, _ in reversed(path):
            self._by_use.move_to_end(node)

    def _drop_oldest_end(self) -> None:
        oldest, _ = self._by_use.popitem(last=False)
        assert oldest.parent is not None and not oldest.children
        del oldest.parent.children[int(oldest.tokens[0])]
        self.num_bytes -= oldest.num_bytes


def _split(node: _Node, at: int) -> _Node:
    """Cut a node in two after `at` tokens; the second part, which is returned, becomes its only child.

    Copies, so that a part's memory is free when the part is dropped.
    """
    rest = _Node(node.tokens[at:].copy(), node.keys[:, :, at:].clone(), node.values[:, :, at:].clone(), node)
    rest.children = node.children
    for child in rest.children.values():
        child.parent = rest
    node.tokens, node.children = node.tokens[:at].copy(), {int(rest.tokens[0]): rest}
    node.keys, node.values = node.keys[:, :, :at].clone(), node.values[:, :, :at].clone()
    return rest


def _joined(path: Sequence[tuple[_Node, int]], capacity: int) -> KVCache:
    """A KV cache of its own with the tokens of a path, and room for `capacity` tokens."""
    tokens = np.concatenate([node.tokens[:shared] for node, shared in path])
    kv_cache = KVCache(tokens)
    like_keys, like_values = path[0][0].keys[0], path[0][0].values[0]
    kv_cache.reserve(path[0][0].keys.shape[0], max(capacity, len(tokens)), like_keys, like_values)
    assert kv_cache.keys is not None and kv_cache.values is not None
    at = 0
    for node, shared in path:
        kv_cache.keys[:, :, at : at + shared] = node.keys[:, :, :shared]
        kv_cache.values[:, :, at : at + shared] = node.values[:, :, :shared]
        at += shared
    return kv_cache


def _num_bytes(kv_cache: KVCache) -> int:
    pairs = [(kv_cache.keys, kv_cache.values), *kv_cache.odd_layers.values()]
    return sum(tensor.nbytes for pair in pairs for tensor in pair if tensor is not None)


def common_prefix_length(one: np.ndarray, other: np.ndarray) -> int:
    """How many first tokens two texts share."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length
