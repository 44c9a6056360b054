"""Merge the branches of several drafters into one draft tree, best nodes first, up to a number of nodes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

from saltus.core.picking import Distribution


@dataclass(frozen=True)
class Branch:
    """A drafted continuation, with the probability in [0, 1] that each token is accepted if those before it are.

    All sequences have the length of `tokens` (see `draft_faults`); `payoffs` do not increase along the branch.

    If `distributions` gives the distribution that each token was sampled from, a token's probability must not depend on
    the token itself, only on those before it: `reject` is exact only if no draft is dropped for its sampled token.
    """

    tokens: Sequence[int]
    acceptance_probabilities: Sequence[float]
    source: str = ""  # the drafter, or a part of it; acceptance is recorded per source
    distributions: Sequence[Distribution] | None = None
    payoffs: Sequence[float] | None = None  # tokens that verifying a node saves later (Jacobi)


@dataclass(frozen=True, eq=False)
class DraftNodes:
    """Several branches, one for each leaf of a tree in arrays. They are not sampled and have no payoffs."""

    tokens: Int[np.ndarray, "nodes"]  # int64
    parents: Int[np.ndarray, "nodes"]  # int64, −1 for none; parents come before their children
    acceptance_probabilities: Float[np.ndarray, "nodes"]  # float64, as those of a `Branch`
    source: str = ""

    @cached_property
    def branches(self) -> list[Branch]:
        """The branches, in the order of their leaves."""
        tokens, parents, chances = (
            column.tolist() for column in (self.tokens, self.parents, self.acceptance_probabilities)
        )
        inner, branches = set(parents), []
        for leaf in range(len(tokens)):
            if leaf in inner:
                continue
            path, node = [], leaf
            while node >= 0:
                path.append(node)
                node = parents[node]
            path.reverse()
            branches.append(Branch([tokens[node] for node in path], [chances[node] for node in path], self.source))
        return branches


Drafts = Branch | DraftNodes
"""What a drafter offers: a branch, or several of them."""


def each_branch(drafts: Iterable[Drafts]) -> list[Branch]:
    """The branches of drafts."""
    return [branch for each in drafts for branch in (each.branches if isinstance(each, DraftNodes) else (each,))]


def first_tokens(drafts: Iterable[Drafts]) -> set[int]:
    """The tokens that drafts begin with."""
    found: set[int] = set()
    for each in drafts:
        found.update(each.tokens[each.parents < 0].tolist() if isinstance(each, DraftNodes) else each.tokens[:1])
    return found


@dataclass(frozen=True)
class Tree:
    """The nodes for one call, best first; parents come before their children."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    acceptance_probabilities: tuple[float, ...]  # as the source states them: given that the parent is accepted
    sources: tuple[str, ...]
    expected_tokens: tuple[float, ...]  # the product of probabilities down to the node, or its payoff; falling
    distributions: tuple[Distribution | None, ...]
    payoffs: tuple[float, ...]  # as stated
    payoff_sources: tuple[str, ...]  # the source that stated the payoff; "" if there is none

    def prune(self, size: int) -> Tree:
        """The tree of the `size` best nodes."""
        if size >= len(self.tokens):
            return self
        return Tree(*(column[:size] for column in vars(self).values()))


def grow_tree(
    drafts: Sequence[Drafts],
    max_draft_tokens: int,
    max_depth: int,
    calibrate: Callable[[str, float], float] = lambda source, probability: probability,
    calibrate_payoff: Callable[[str, float], float] = lambda source, payoff: payoff,
    min_expected_tokens: float = 0.0,
) -> Tree:
    """Merge branches and keep the `max_draft_tokens` nodes with most expected tokens, at most `max_depth` deep.

    `calibrate` and `calibrate_payoff` correct what a source states: the source and its number to the number to use.
    Nodes with fewer than `min_expected_tokens` are left out, which saves time, but for first tokens: what becomes of
    them is recorded, so that a drafter that was wrong for long is trusted again when it is right.

    Expected tokens fall along a path, so repeatedly taking the best node whose parent is in the tree gives the best
    tree of that size. If branches share a token, the source with the highest probability stands for it. Sampled tokens
    (with `distributions`) are never merged: two equal samples are two tries (see `reject`).
    """
    offered, roots = _merge(each_branch(drafts), max_depth, calibrate, calibrate_payoff)
    waiting = [(root, -1, 1.0) for root in roots]  # node, its parent in the tree, probability of its parent
    heap: list[tuple[float, int, int, float]] = []
    rows = []
    while len(rows) < max_draft_tokens:
        for node, parent, probability in waiting:
            probability *= offered[node].probability
            heapq.heappush(heap, (-max(probability, offered[node].payoff), node, parent, probability))
        if not heap:
            break
        negative, best, parent, probability = heapq.heappop(heap)
        waiting = []
        if parent >= 0 and -negative < min_expected_tokens:
            continue
        node = offered[best]
        waiting = [(child, len(rows), probability) for child in node.children]
        stated = node.stated_probability, node.source, -negative, node.distribution
        rows.append((node.token, parent, *stated, node.stated_payoff, node.payoff_source))
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
    payoff: float = 0.0  # calibrated
    children: list[int] = field(default_factory=list)


def _merge(branches: Sequence[Branch], max_depth: int, calibrate, calibrate_payoff) -> tuple[list[_Node], list[int]]:
    """All nodes of the branches, and the indices of the roots."""
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
            node, probability = nodes[place], calibrate(branch.source, stated)
            if probability > node.probability:
                node.probability, node.stated_probability, node.source = probability, stated, branch.source
            if branch.payoffs and (payoff := calibrate_payoff(branch.source, branch.payoffs[i])) > node.payoff:
                node.stated_payoff, node.payoff, node.payoff_source = branch.payoffs[i], payoff, branch.source
            at = place
    return nodes, roots
