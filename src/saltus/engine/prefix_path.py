"""The nodes of a tree of prefixes, and the paths that texts take through them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor


@dataclass(eq=False)
class Snapshot:
    """The states of recurrent layers after one of a node's tokens."""

    states: Tensor
    node: Node
    place: int  # how many of the node's tokens they have read, 1 or more


@dataclass(eq=False)
class Node:
    """A run of tokens after its parent's, with the keys and values of exactly these tokens."""

    tokens: np.ndarray
    keys: Tensor  # [layers, kv_heads, tokens, dim]
    values: Tensor
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)  # by first token
    snapshots: dict[int, Snapshot] = field(default_factory=dict)  # by place; of networks with recurrent layers

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @property
    def bytes_per_token(self) -> int:
        layers, heads, _, dim = self.keys.shape
        return layers * heads * (dim + self.values.shape[-1]) * self.keys.element_size()


Path = Sequence[tuple[Node, int]]
"""Nodes from a child of the root down, each with how many of its tokens a text shares: all, but for the last one."""


def find_path(root: Node, tokens: np.ndarray) -> Path:
    """The nodes along the tokens, as far as these are known."""
    path, node, at = [], root, 0
    while at < len(tokens) and (child := node.children.get(int(tokens[at]))) is not None:
        shared = common_prefix_length(child.tokens, tokens[at:])
        path.append((child, shared))
        at += shared
        if shared < len(child.tokens):
            break
        node = child
    return path


def num_tokens(path: Path) -> int:
    """How many tokens a path has."""
    return sum(shared for _, shared in path)


def cut(path: Path, length: int) -> Path:
    """The first tokens of a path."""
    first = []
    for node, shared in path:
        if length > 0:
            first.append((node, min(shared, length)))
        length -= shared
    return first


def snapshots_along(path: Path) -> dict[int, Snapshot]:
    """The snapshots on a path, by position."""
    found, end = {}, 0
    for node, shared in path:
        found |= {end + place: snapshot for place, snapshot in node.snapshots.items() if place <= shared}
        end += shared
    return found


def joined(path: Path, capacity: int) -> tuple[np.ndarray, Tensor, Tensor]:
    """The tokens of a path, and keys and values of their own with room for `capacity` tokens."""
    tokens = np.concatenate([node.tokens[:shared] for node, shared in path])
    first, capacity = path[0][0], max(capacity, len(tokens))
    keys, values = (
        like.new_empty(like.shape[0], like.shape[1], capacity, like.shape[3]) for like in (first.keys, first.values)
    )
    copy(path, 0, keys, values)
    return tokens, keys, values


def copy(path: Path, begin: int, keys: Tensor, values: Tensor) -> None:
    """Copy keys and values of a path from its token `begin` on to the same places of buffers."""
    at = 0
    for node, shared in path:
        if (first := max(begin - at, 0)) < shared:
            keys[:, :, at + first : at + shared] = node.keys[:, :, first:shared]
            values[:, :, at + first : at + shared] = node.values[:, :, first:shared]
        at += shared


def split(node: Node, at: int) -> Node:
    """Cut a node in two after `at` tokens; the second part, which is returned, becomes its only child.

    Copies, so that a part's memory is free when the part is dropped.
    """
    rest = Node(node.tokens[at:].copy(), node.keys[:, :, at:].clone(), node.values[:, :, at:].clone(), node)
    for snapshot in [snapshot for place, snapshot in node.snapshots.items() if place > at]:
        del node.snapshots[snapshot.place]
        snapshot.node, snapshot.place = rest, snapshot.place - at
        rest.snapshots[snapshot.place] = snapshot
    rest.children = node.children
    for child in rest.children.values():
        child.parent = rest
    node.tokens, node.children = node.tokens[:at].copy(), {int(rest.tokens[0]): rest}
    node.keys, node.values = node.keys[:, :, :at].clone(), node.values[:, :, :at].clone()
    return rest


def common_prefix_length(one: np.ndarray, other: np.ndarray) -> int:
    """How many first tokens two texts share."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length
