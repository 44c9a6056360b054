"""Keep keys and values of read texts in a tree of their prefixes, so that texts that begin alike share the reading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from torch import Tensor

from saltus.engine.prefix_cache import common_prefix_length
from saltus.networks.kv_cache.kv_cache import MIN_GROWTH, KVCache


@dataclass(eq=False)
class _Node:
    """A run of tokens after its parent's, with the keys and values of exactly these tokens."""

    tokens: np.ndarray
    keys: Tensor  # [layers, kv_heads, tokens, dim]
    values: Tensor
    parent: _Node | None
    children: dict[int, _Node] = field(default_factory=dict)  # by first token
    last_use: int = 0

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


@dataclass
class PrefixTree:
    """A radix tree over the tokens that networks have read, at most `max_bytes` of keys and values in all.

    A text takes a copy of the longest prefix that the tree has, so any number of texts may share it. The ends of the
    tree that were not used for longest are dropped first. For networks for which `supports_prefix_cache` is true; KV
    caches of another type than KVCache are not kept.
    """

    max_bytes: int = 2**30
    num_bytes: int = field(default=0, init=False)
    _roots: dict[str, _Node] = field(default_factory=dict, init=False)  # by network
    _clock: Iterator[int] = field(default_factory=lambda: count(1), init=False, repr=False)

    def clear(self) -> None:
        """Forget everything."""
        self._roots.clear()
        self.num_bytes = 0

    def take(self, prompt: Sequence[int]) -> dict[str, Any]:
        """New KV caches by network, filled with the longest known prefix of the prompt; empty if none is known."""
        tokens, found = np.asarray(prompt, dtype=np.int64), {}
        for name, root in self._roots.items():
            path = self._path(root, tokens)
            if path:
                found[name] = _joined(path, len(tokens) + MIN_GROWTH)
        return found

    def put(self, prompt: Sequence[int], kv_caches: Mapping[str, Any]) -> None:
        """Copy what the KV caches of a text have and the tree has not. The prompt is not needed: caches name tokens."""
        for name, kv_cache in kv_caches.items():
            if type(kv_cache) is KVCache and kv_cache.keys is not None and len(kv_cache.tokens):
                if kv_cache.odd_layers:  # of other sizes
                    continue
                self._add(name, kv_cache)
        while self.num_bytes > self.max_bytes:
            self._drop_oldest_end()

    def _path(self, root: _Node, tokens: np.ndarray) -> list[tuple[_Node, int]]:
        """The nodes along the tokens, and how many of each node's tokens agree."""
        path, node, at, now = [], root, 0, next(self._clock)
        while at < len(tokens) and (child := node.children.get(int(tokens[at]))) is not None:
            shared = common_prefix_length(child.tokens, tokens[at:])
            child.last_use = now
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
        if known == len(tokens):
            return
        if path:
            node, shared = path[-1]
            if shared < len(node.tokens):
                _split(node, shared)
        new = slice(known, len(tokens))
        end = _Node(tokens[new].copy(), keys[:, :, new].clone(), values[:, :, new].clone(), node)
        end.last_use = next(self._clock)
        node.children[int(tokens[known])] = end
        self.num_bytes += end.num_bytes

    def _drop_oldest_end(self) -> None:
        ends = [node for root in self._roots.values() for node in _descendants(root) if not node.children]
        oldest = min(ends, key=lambda node: node.last_use)
        assert oldest.parent is not None
        del oldest.parent.children[int(oldest.tokens[0])]
        self.num_bytes -= oldest.num_bytes


def _split(node: _Node, at: int) -> None:
    """Cut a node in two after `at` tokens; the second part becomes its only child. Copies, so that a part's memory is
    free when the part is dropped."""
    rest = _Node(node.tokens[at:].copy(), node.keys[:, :, at:].clone(), node.values[:, :, at:].clone(), node)
    rest.children, rest.last_use = node.children, node.last_use
    for child in rest.children.values():
        child.parent = rest
    node.tokens, node.children = node.tokens[:at].copy(), {int(rest.tokens[0]): rest}
    node.keys, node.values = node.keys[:, :, :at].clone(), node.values[:, :, :at].clone()


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


def _descendants(root: _Node) -> Iterator[_Node]:
    waiting = list(root.children.values())
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children.values()
