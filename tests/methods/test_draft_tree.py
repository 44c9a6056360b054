"""Trees of drafts that are predicted at once hold the likeliest paths, whatever their size."""

from itertools import product

import numpy as np
import pytest

from saltus.methods.shared.draft_tree import Likeliest, PositionPredictions, grown_nodes, likely_paths, likely_tokens


@pytest.mark.parametrize("max_nodes", [12, 40])
def test_a_tree_holds_the_paths_with_the_greatest_products_of_probabilities(max_nodes):
    random = np.random.default_rng(1)
    predictions = PositionPredictions([likely_tokens(row) for row in random.normal(size=(3, 9)).astype(np.float32)])
    choose, found = Likeliest(4), {}
    nodes = grown_nodes(predictions, [1, 2], choose, max_nodes)
    for parent, token, chance in nodes:
        path, reached = next(((key, value[1]) for key, value in found.items() if value[0] == parent), ((), 1.0))
        found[(*path, token)] = len(found), reached * chance
    offered = [choose(predictions, position, ()) for position in range(3)]
    every = {
        tuple(token for token, _ in path): float(np.prod([chance for _, chance in path]))
        for depth in (1, 2, 3)
        for path in product(*offered[:depth])
    }
    likeliest = sorted(every, key=lambda path: -every[path])[:max_nodes]
    least = 0.01 * 12 / max_nodes
    assert set(found) == {path for path in likeliest if every[path] >= least}
    branches = [
        branch for nodes in likely_paths(predictions, [1, 2], choose, "ptp", max_nodes) for branch in nodes.branches
    ]
    assert {tuple(b.tokens[:n]) for b in branches for n in range(1, len(b.tokens) + 1)} == set(found)


def test_growth_by_siblings_adds_all_children_of_the_likeliest_node():
    rows = np.log(np.array([[0.6, 0.3, 0.1], [0.45, 0.4, 0.15]], dtype=np.float32))
    predictions, choose = PositionPredictions([likely_tokens(row) for row in rows]), Likeliest(2)
    siblings = grown_nodes(predictions, [1, 2], choose, 5, "siblings")
    assert [node[:2] for node in siblings] == [(-1, 0), (-1, 1), (0, 0), (0, 1), (1, 0)]
    assert [node[:2] for node in grown_nodes(predictions, [1, 2], choose, 3)] == [(-1, 0), (-1, 1), (0, 0)]
    short = grown_nodes(predictions, [1, 2], choose, 3, "siblings")
    assert short == siblings[:3]


def test_growth_by_siblings_has_no_least_probability():
    rows = np.log(np.array([[0.999, 0.001]] * 2, dtype=np.float32))
    predictions = PositionPredictions([likely_tokens(row) for row in rows])
    counts = {growth: len(grown_nodes(predictions, [1], Likeliest(2), 12, growth)) for growth in ("nodes", "siblings")}
    assert counts == {"nodes": 2, "siblings": 6}
