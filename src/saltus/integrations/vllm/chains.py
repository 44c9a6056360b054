"""Draft chains for engines that cannot verify trees: the best path of a tree, and how much of each path pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from saltus.core.tree import Tree


def best_chain(tree: Tree) -> Tree:
    """The path of the tree that is expected to be accepted furthest."""
    totals: list[float] = []  # expected tokens down to each node
    for parent, expected in zip(tree.parents, tree.expected_tokens, strict=True):
        totals.append(expected + (totals[parent] if parent >= 0 else 0.0))
    path, node = [], max(range(len(totals)), key=totals.__getitem__, default=-1)
    while node >= 0:
        path.append(node)
        node = tree.parents[node]
    path.reverse()
    columns: dict[str, Any] = {name: tuple(column[node] for node in path) for name, column in vars(tree).items()}
    columns["parents"] = tuple(range(-1, len(path) - 1))
    return Tree(**columns)


def lengths_that_pay(chains: Sequence[Tree], seconds_for: Callable[[int], float]) -> list[int]:
    """How many tokens of each chain one call should verify: those with the most expected tokens a second in all.

    With n tokens the call has len(chains) + n rows. Expected tokens fall along a chain, so the most promising n tokens
    of all chains are the beginnings of chains.
    """
    offered = sorted(
        (-expected, number, depth)
        for number, chain in enumerate(chains)
        for depth, expected in enumerate(chain.expected_tokens)
    )
    expected = float(len(chains))
    best, best_rate = 0, expected / seconds_for(len(chains)) if chains else 0.0
    for n, (negative, _, _) in enumerate(offered, start=1):
        expected -= negative
        rate = expected / seconds_for(len(chains) + n)
        if rate > best_rate:
            best, best_rate = n, rate
    lengths = [0] * len(chains)
    for _, number, _ in offered[:best]:
        lengths[number] += 1
    return lengths
