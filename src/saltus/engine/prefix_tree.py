"""Keep keys and values of read texts by their prefixes, so that a text that begins like another is not read again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saltus.models.cpu.hybrid_kv_cache import HybridKVCache, StateSizes
from saltus.models.cpu.kv_cache import MIN_GROWTH, KVCache
from saltus.models.cuda.kv_pages import FixedShapeKVCache, KVPagePool
from saltus.models.cuda.state_pages import StateKVCache
from saltus.models.protocols import TargetNetwork

MAX_WHOLE_CACHES = 4
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


def _reader(kv_cache: KVCache) -> Reader:
    keys, values = kv_cache.keys, kv_cache.values
    assert keys is not None and values is not None
    return lambda span: (keys[:, :, span].clone(), values[:, :, span].clone())


@dataclass(eq=False)
class _State:
    """The states of recurrent layers after one of a node's tokens."""

    states: Tensor
    node: _Node
    place: int  # how many of the node's tokens they have read, 1 or more


@dataclass(eq=False)
class _Node:
    """A run of tokens after its parent's, with the keys and values of exactly these tokens."""

    tokens: np.ndarray  # at most MAX_NODE_TOKENS
    keys: Tensor  # [layers, kv_heads, tokens, dim]
    values: Tensor
    parent: _Node | None
    children: dict[int, _Node] = field(default_factory=dict)  # by first token
    states: dict[int, _State] = field(default_factory=dict)  # by place; of networks with recurrent layers

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @property
    def bytes_per_token(self) -> int:
        layers, heads, _, dim = self.keys.shape
        return layers * heads * (dim + self.values.shape[-1]) * self.keys.element_size()


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
    num_bytes: int = field(default=0, init=False)
    _roots: dict[str, _Node] = field(default_factory=dict, init=False)  # by network
    _pools: dict[str, KVPagePool] = field(default_factory=dict, init=False)  # of networks whose caches have pages
    _whole: list[tuple[str, int, KVCache | StateKVCache]] = field(
        default_factory=list, init=False
    )  # network, prompt's length, cache
    # All nodes but the roots, those first that were not used for longest. A use moves children before their parents to
    # the end, so that the first node of all is always an end of the tree.
    _by_use: OrderedDict[_Node, None] = field(default_factory=OrderedDict, init=False, repr=False)
    _states_by_use: OrderedDict[_State, None] = field(default_factory=OrderedDict, init=False, repr=False)
    _state_bytes: int = field(default=0, init=False)  # of `num_bytes`
    _state_sizes: dict[str, StateSizes] = field(default_factory=dict, init=False)  # by network

    def clear(self) -> None:
        """Forget everything."""
        self._roots.clear()
        self._pools.clear()
        self._by_use.clear()
        self._whole.clear()
        self._states_by_use.clear()
        self.num_bytes = self._state_bytes = 0

    def take(
        self, prompt: Sequence[int], networks: Collection[str] | None = None, max_tokens: int | None = None
    ) -> dict[str, Any]:
        """New KV caches by network, filled with the longest known prefix of the prompt; empty if none is known.

        With `networks` of these alone: a copy for a network that does not read the text would be memory for nothing.
        With `max_tokens` those that can be cut have no more tokens, and room for the others, which `extend` copies.
        """
        tokens, taken = np.asarray(prompt, dtype=np.int64), {}
        for name, root in self._roots.items():
            if networks is not None and name not in networks:
                continue
            path = self._path(root, tokens)
            self._touch(path)
            if name in self._state_sizes:
                if (kv_cache := self._taken_with_states(name, path, len(tokens) + MIN_GROWTH)) is not None:
                    taken[name] = kv_cache
            elif path and (pool := self._pools.get(name)) is not None:
                taken[name] = kv_cache = FixedShapeKVCache(pool)
                kv_cache.fill(*_joined(path, 0))
            elif path:
                first = path if max_tokens is None else _cut(path, max_tokens)
                taken[name] = KVCache(*_joined(first, len(tokens) + MIN_GROWTH))
        for name in {name for name, *_ in self._whole} - set(taken):
            if (networks is None or name in networks) and (kv_cache := self._take_whole(name, tokens)) is not None:
                taken[name] = kv_cache
        return taken

    @torch.inference_mode()  # a call may have made the buffers
    def extend(self, prompt: Sequence[int], kv_caches: Mapping[str, Any], max_tokens: int) -> None:
        """Copy what is known of the next `max_tokens` tokens of a prompt into caches that `take` has begun with."""
        tokens = np.asarray(prompt, dtype=np.int64)
        for name, kv_cache in kv_caches.items():
            if name not in self._roots or type(kv_cache) is not KVCache or kv_cache.keys is None:
                continue
            assert kv_cache.values is not None
            begin = len(kv_cache.tokens)
            path = _cut(self._path(self._roots[name], tokens), min(begin + max_tokens, kv_cache.keys.shape[2]))
            end = sum(shared for _, shared in path)
            if end > begin:
                self._touch(path)
                _copy(path, begin, kv_cache.keys, kv_cache.values)
                kv_cache.tokens = tokens[:end].copy()

    def _taken_with_states(self, name: str, path: list[tuple[_Node, int]], capacity: int) -> HybridKVCache | None:
        """A new cache of the path up to its last snapshot; None if there is none."""
        known = _states_along(path)
        if not known:
            return None
        position, state = max(known.items())
        self._states_by_use.move_to_end(state)
        snapshots = {at: each.states for at, each in known.items()}
        return HybridKVCache(
            *_joined(_cut(path, position), capacity), sizes=self._state_sizes[name], num_read=position,
            snapshots=snapshots,
        )  # fmt: skip

    def _take_whole(self, name: str, tokens: np.ndarray) -> KVCache | StateKVCache | None:
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
        kv_cache = best[2]
        if isinstance(kv_cache, StateKVCache):
            kv_cache.reuse_prefix(tokens)
        else:
            kv_cache.reuse_prefix(tokens, 0)
        return kv_cache

    def put(self, prompt: Sequence[int], kv_caches: Mapping[str, Any], ended: bool = True) -> None:
        """Copy what the KV caches of a text have and the tree has not.

        Where a text has `ended`, its caches that cannot be cut are kept themselves.
        """
        for name, kv_cache in kv_caches.items():
            if isinstance(kv_cache, StateKVCache):
                if ended and len(kv_cache.tokens):
                    self._keep_whole(name, prompt, kv_cache)
                continue
            if isinstance(kv_cache, FixedShapeKVCache):
                if len(kv_cache.tokens):
                    self._pools[name] = kv_cache.pool
                    self._add(name, kv_cache.tokens, kv_cache.read)
                continue
            if not isinstance(kv_cache, KVCache) or kv_cache.keys is None or not len(kv_cache.tokens):
                continue
            if isinstance(kv_cache, HybridKVCache) and not kv_cache.odd_layers:
                self._add_with_states(name, kv_cache, ended)
            elif type(kv_cache) is KVCache and not kv_cache.odd_layers:
                self._add(name, kv_cache.tokens, _reader(kv_cache))
            elif ended:
                self._keep_whole(name, prompt, kv_cache)
        while self._whole and (len(self._whole) > MAX_WHOLE_CACHES or self.num_bytes > self.max_bytes):
            self.num_bytes -= _num_bytes(self._whole.pop(0)[2])
        while self._states_by_use and self._state_bytes > self.max_bytes // 2:
            self._drop_state(next(iter(self._states_by_use)))
        while self.num_bytes > self.max_bytes and self._by_use:
            self._drop_oldest_end()

    def _keep_whole(self, name: str, prompt: Sequence[int], kv_cache: KVCache | StateKVCache) -> None:
        self._whole.append((name, len(prompt), kv_cache))
        self.num_bytes += _num_bytes(kv_cache)

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

    def _add_with_states(self, name: str, kv_cache: HybridKVCache, ended: bool) -> None:
        """Add a text up to its last snapshot; a text that has ended gives its states away as one."""
        states = dict(kv_cache.snapshots)
        if ended and kv_cache.num_read == len(kv_cache.tokens) and not kv_cache.in_call:
            states.setdefault(kv_cache.num_read, kv_cache.states)
        if not states:
            return
        self._state_sizes[name] = kv_cache.sizes
        self._add(name, kv_cache.tokens[: max(states)], _reader(kv_cache))
        end = 0
        for node, shared in self._path(self._roots[name], kv_cache.tokens[: max(states)]):
            begin, end = end, end + shared
            for place in (position - begin for position in states if begin < position <= end):
                if place not in node.states:
                    node.states[place] = state = _State(states[begin + place], node, place)
                    self._states_by_use[state] = None
                    self._state_bytes += state.states.nbytes
                    self.num_bytes += state.states.nbytes

    def _drop_state(self, state: _State) -> None:
        del self._states_by_use[state], state.node.states[state.place]
        self._state_bytes -= state.states.nbytes
        self.num_bytes -= state.states.nbytes

    def _add(self, name: str, tokens: np.ndarray, read: Reader) -> None:
        """Add tokens, whose keys and values `read` copies; not those that there is no room for even alone."""
        if name not in self._roots:
            self._roots[name] = _Node(tokens[:0].copy(), *read(slice(0, 0)), None)
        node = self._roots[name]
        tokens = tokens[: (self.max_bytes - self._state_bytes) // max(node.bytes_per_token, 1)]
        path = self._path(node, tokens)
        known, added = sum(shared for _, shared in path), []
        if known < len(tokens) and path:
            node, shared = path[-1]
            if shared < len(node.tokens):
                self._by_use[_split(node, shared)] = None
        for begin in range(known, len(tokens), MAX_NODE_TOKENS):
            new = slice(begin, min(begin + MAX_NODE_TOKENS, len(tokens)))
            end = _Node(tokens[new].copy(), *read(new), node)
            node.children[int(tokens[begin])] = end
            self.num_bytes += end.num_bytes
            added.append(end)
            node = end
        self._by_use |= dict.fromkeys(reversed(added))
        self._touch(path)

    def _touch(self, path: Sequence[tuple[_Node, int]]) -> None:
        """Note that the nodes of a path are used now."""
        for node, _ in reversed(path):
            self._by_use.move_to_end(node)

    def _drop_oldest_end(self) -> None:
        oldest, _ = self._by_use.popitem(last=False)
        assert oldest.parent is not None and not oldest.children
        for state in list(oldest.states.values()):
            self._drop_state(state)
        del oldest.parent.children[int(oldest.tokens[0])]
        self.num_bytes -= oldest.num_bytes


def _split(node: _Node, at: int) -> _Node:
    """Cut a node in two after `at` tokens; the second part, which is returned, becomes its only child.

    Copies, so that a part's memory is free when the part is dropped.
    """
    rest = _Node(node.tokens[at:].copy(), node.keys[:, :, at:].clone(), node.values[:, :, at:].clone(), node)
    for state in [state for place, state in node.states.items() if place > at]:
        del node.states[state.place]
        state.node, state.place = rest, state.place - at
        rest.states[state.place] = state
    rest.children = node.children
    for child in rest.children.values():
        child.parent = rest
    node.tokens, node.children = node.tokens[:at].copy(), {int(rest.tokens[0]): rest}
    node.keys, node.values = node.keys[:, :, :at].clone(), node.values[:, :, :at].clone()
    return rest


def _states_along(path: Sequence[tuple[_Node, int]]) -> dict[int, _State]:
    """The states on a path, by position."""
    found, end = {}, 0
    for node, shared in path:
        found |= {end + place: state for place, state in node.states.items() if place <= shared}
        end += shared
    return found


def _cut(path: Sequence[tuple[_Node, int]], length: int) -> list[tuple[_Node, int]]:
    """The first tokens of a path."""
    cut = []
    for node, shared in path:
        if length > 0:
            cut.append((node, min(shared, length)))
        length -= shared
    return cut


def _joined(path: Sequence[tuple[_Node, int]], capacity: int) -> tuple[np.ndarray, Tensor, Tensor]:
    """The tokens of a path, and keys and values of their own with room for `capacity` tokens."""
    tokens = np.concatenate([node.tokens[:shared] for node, shared in path])
    first, capacity = path[0][0], max(capacity, len(tokens))
    keys, values = (
        like.new_empty(like.shape[0], like.shape[1], capacity, like.shape[3]) for like in (first.keys, first.values)
    )
    _copy(path, 0, keys, values)
    return tokens, keys, values


def _copy(path: Sequence[tuple[_Node, int]], begin: int, keys: Tensor, values: Tensor) -> None:
    """Copy keys and values of a path from its token `begin` on to the same places of buffers."""
    at = 0
    for node, shared in path:
        if (first := max(begin - at, 0)) < shared:
            keys[:, :, at + first : at + shared] = node.keys[:, :, first:shared]
            values[:, :, at + first : at + shared] = node.values[:, :, first:shared]
        at += shared


def _num_bytes(kv_cache: KVCache | StateKVCache) -> int:
    if isinstance(kv_cache, StateKVCache):
        return kv_cache.num_bytes
    pairs = [(kv_cache.keys, kv_cache.values), *kv_cache.odd_layers.values()]
    return sum(tensor.nbytes for pair in pairs for tensor in pair if tensor is not None)


def common_prefix_length(one: np.ndarray, other: np.ndarray) -> int:
    """How many first tokens two texts share."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length
