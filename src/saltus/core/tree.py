"""Grow one tree from the branches of several drafters: best-first, within a budget of nodes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from saltus.core.sampling import Law


@dataclass(frozen=True)
class Branch:
    """A drafted continuation of the decided text, and how likely each token is if those before it are right.

    Where `laws` gives the law that each token was drawn from, the chances must not depend on the token itself
    (only on those before it): the rule `reject` is exact only when no draft is dropped for what it drew.
    """

    tokens: Sequence[int]
    chances: Sequence[float]
    source: str = ""  # who offers it: acceptance is learned apart for each source
    laws: Sequence[Law] | None = None


@dataclass(frozen=True)
class Tree:
    """The nodes chosen for one call, parents before children, best first."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    chances: tuple[float, ...]  # as stated by the source: a node is right if its parent is
    sources: tuple[str, ...]
    values: tuple[float, ...]  # of a node: the product of the chances down to it; falls along the tuple
    laws: tuple[Law | None, ...]

    def cut(self, size: int) -> Tree:
        """The `size` best nodes: still a tree, since a node never stands before its parent."""
        return Tree(*(column[:size] for column in vars(self).values()))


def grow(
    branches: Sequence[Branch],
    budget: int,
    depth: int,
    calibrate: Callable[[str, float], float] = lambda source, chance: chance,
) -> Tree:
    """Merge branches into one tree and keep the `budget` nodes of highest value, none deeper than `depth` tokens.

    Values fall along a path, so taking the best node whose parent is taken gives the best tree of that size.
    Tokens drawn from a law of their own are never merged: two equal draws are two tries (see `reject`).
    """
    heap: list[tuple[float, int, int, int, int]] = []  # −value, tie-break, branch, index in it, parent
    seen: dict[tuple[int, int], int] = {}
    nodes: list[tuple[int, int, float, str, float, Law | None]] = []
    tick = 0

    def offer(branch: int, index: int, parent: int, value: float) -> None:
        nonlocal tick
        if index < min(len(branches[branch].tokens), depth):
            chance = calibrate(branches[branch].source, branches[branch].chances[index])
            heapq.heappush(heap, (-value * chance, tick, branch, index, parent))
            tick += 1

    for branch in range(len(branches)):
        offer(branch, 0, -1, 1.0)
    while heap and len(nodes) < budget:
        negative, _, branch, index, parent = heapq.heappop(heap)
        source, token = branches[branch].source, int(branches[branch].tokens[index])
        laws = branches[branch].laws
        node = seen.get((parent, token)) if laws is None else None
        if node is None:
            node = len(nodes)
            stated = branches[branch].chances[index]
            nodes.append((token, parent, stated, source, -negative, laws[index] if laws else None))
            if laws is None:
                seen[parent, token] = node
        offer(branch, index + 1, node, -negative)
    columns = tuple(zip(*nodes, strict=True)) or ((),) * 6
    tokens, parents, chances, sources, values, laws = columns
    return Tree(tokens, parents, chances, sources, values, laws)
