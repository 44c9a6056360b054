"""Grow one tree from the branches of several drafters: best-first, within a budget of nodes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from saltus.core.sampling import Distribution


@dataclass(frozen=True)
class Branch:
    """A drafted continuation of the decided text, and how likely each token is if those before it are right.

    Where `laws` gives the law that each token was drawn from, the chances must not depend on the token itself
    (only on those before it): the rule `reject` is exact only when no draft is dropped for what it drew.
    """

    tokens: Sequence[int]
    acceptance_probabilities: Sequence[float]
    source: str = ""  # who offers it: acceptance is learned apart for each source
    distributions: Sequence[Distribution] | None = None
    payoffs: Sequence[float] | None = None  # tokens that asking a node brings in later calls, right or not; falling


@dataclass(frozen=True)
class Tree:
    """The nodes chosen for one call, parents before children, best first."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    acceptance_probabilities: tuple[float, ...]  # as stated by the source: a node is right if its parent is
    sources: tuple[str, ...]
    expected_tokens: tuple[
        float, ...
    ]  # tokens that a node brings: chances multiplied down to it, or its worth; falling
    distributions: tuple[Distribution | None, ...]
    payoffs: tuple[float, ...]  # as stated
    payoff_sources: tuple[str, ...]  # the source that stated the worth; "" where there is none

    def prune(self, size: int) -> Tree:
        """The `size` best nodes: still a tree, since a node never stands before its parent."""
        return Tree(*(column[:size] for column in vars(self).values()))


def grow_tree(
    branches: Sequence[Branch],
    budget: int,
    max_depth: int,
    calibrate: Callable[[str, float], float] = lambda source, chance: chance,
    calibrate_payoff: Callable[[str, float], float] = lambda source, worth: worth,
) -> Tree:
    """Merge branches into one tree and keep the `budget` nodes of highest value, none deeper than `depth` tokens.

    Values fall along a path, so taking the best node whose parent is taken gives the best tree of that size. Where
    branches share a token, the source that trusts it most speaks for it. Tokens drawn from a law of their own are
    never merged: two equal draws are two tries (see `reject`).
    """
    offered, roots = _merge(branches, max_depth, calibrate, calibrate_payoff)
    waiting = [(root, -1, 1.0) for root in roots]  # node, place of its parent, chance of its parent
    heap: list[tuple[float, int, int, float]] = []
    rows = []
    while len(rows) < budget:
        for node, parent, chance in waiting:
            chance *= offered[node].probability
            heapq.heappush(heap, (-max(chance, offered[node].payoff), node, parent, chance))
        if not heap:
            break
        negative, best, parent, chance = heapq.heappop(heap)
        node = offered[best]
        waiting = [(child, len(rows), chance) for child in node.children]
        rows.append(
            (
                node.token,
                parent,
                node.stated_probability,
                node.source,
                -negative,
                node.distribution,
                node.stated_payoff,
                node.payoff_source,
            )
        )
    return Tree(*zip(*rows, strict=True)) if rows else Tree(*((),) * 8)


@dataclass
class _Node:
    """A token that branches offer after the same tokens."""

    token: int
    distribution: Distribution | None
    probability: float = -1.0  # calibrated
    stated_probability: float = 0.0
    source: str = ""
    stated_payoff: float = 0.0
    payoff_source: str = ""
    payoff: float = 0.0  # its worth, calibrated
    children: list[int] = field(default_factory=list)


def _merge(branches: Sequence[Branch], max_depth: int, calibrate, calibrate_payoff) -> tuple[list[_Node], list[int]]:
    """All nodes that the branches offer, and which of them are roots."""
    nodes: list[_Node] = []
    roots: list[int] = []
    known: dict[tuple[int, int], int] = {}
    for branch in branches:
        at = -1
        for i in range(min(len(branch.tokens), max_depth)):
            token, stated = int(branch.tokens[i]), branch.acceptance_probabilities[i]
            place = known.get((at, token)) if branch.distributions is None else None
            if place is None:
                place = len(nodes)
                (nodes[at].children if at >= 0 else roots).append(place)
                nodes.append(_Node(token, branch.distributions[i] if branch.distributions else None))
                if branch.distributions is None:
                    known[at, token] = place
            node, chance = nodes[place], calibrate(branch.source, stated)
            if chance > node.probability:
                node.probability, node.stated_probability, node.source = chance, stated, branch.source
            if branch.payoffs and (invested := calibrate_payoff(branch.source, branch.payoffs[i])) > node.payoff:
                node.stated_payoff, node.payoff, node.payoff_source = branch.payoffs[i], invested, branch.source
            at = place
    return nodes, roots
