"""The tree of several drafters' branches: merged, and grown to the best of its size."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.core.picking import one_hot
from saltus.core.tree import Branch, Tree, grow_tree

chances = st.sampled_from([0.05, 0.2, 0.5, 0.8, 0.9, 1.0])
pairs = st.lists(st.tuples(st.integers(0, 2), chances), min_size=1, max_size=4)
forests = st.lists(st.tuples(pairs, st.sampled_from("ab"), st.sampled_from([0.0, 0.0, 0.3])), max_size=4)


def forest(offered) -> list[Branch]:
    return [
        Branch([token for token, _ in pairs], [chance for _, chance in pairs], source, payoffs=[worth] * len(pairs))
        for pairs, source, worth in offered
    ]


def path(tree: Tree, node: int) -> tuple[int, ...]:
    return (*path(tree, tree.parents[node]), tree.tokens[node]) if node >= 0 else ()


def trie(offered: list[Branch], depth: int) -> dict[tuple[int, ...], float]:
    """What each path brings, found the slow way: by the best chance that any branch gives each of its tokens."""
    best: dict[tuple[int, ...], float] = {}
    worth: dict[tuple[int, ...], float] = {}
    for branch in offered:
        for end in range(1, min(len(branch.tokens), depth) + 1):
            key = tuple(branch.tokens[:end])
            best[key] = max(best.get(key, 0.0), branch.acceptance_probabilities[end - 1])
            worth[key] = max(worth.get(key, 0.0), branch.payoffs[end - 1])
    values: dict[tuple[int, ...], float] = {(): math.inf}
    for key in sorted(best, key=len):
        chance = math.prod(best[key[:end]] for end in range(1, len(key) + 1))
        values[key] = min(max(chance, worth[key]), values[key[:-1]])
    del values[()]
    return values


@given(forests, st.integers(0, 6), st.integers(0, 4))
def test_a_tree_is_the_best_of_its_size(offered, max_draft_tokens: int, depth: int):
    """Against all subtrees of the merged branches."""
    offered = forest(offered)
    values = trie(offered, depth)
    tree = grow_tree(offered, max_draft_tokens, depth)
    kept = [path(tree, node) for node in range(len(tree.tokens))]
    assert len(set(kept)) == len(kept) == min(max_draft_tokens, len(values))
    assert tree.expected_tokens == pytest.approx([values[key] for key in kept])
    rest = [key for key in values if len(key) <= depth]
    best = max(
        (
            sum(values[key] for key in subset)
            for subset in itertools.combinations(rest, len(kept))
            if all(len(key) == 1 or key[:-1] in subset for key in subset)
        ),
        default=0.0,
    )
    assert sum(tree.expected_tokens) == pytest.approx(best)


@given(forests, st.integers(0, 8), st.integers(0, 8))
def test_every_cut_of_a_tree_is_a_tree_and_its_values_fall(offered, max_draft_tokens: int, size: int):
    tree = grow_tree(forest(offered), max_draft_tokens, 3).prune(size)
    ForwardInputs(continuation([1], 9), tree.tokens, tree.parents)  # refuses a child before its parent
    assert len(tree.tokens) <= min(size, max_draft_tokens)
    assert list(tree.expected_tokens) == sorted(tree.expected_tokens, reverse=True)
    assert {len(column) for column in vars(tree).values()} == {len(tree.tokens)}


@given(forests)
def test_no_node_is_deeper_than_there_is_room(offered):
    for depth in range(4):
        tree = grow_tree(forest(offered), 50, depth)
        assert max((len(path(tree, node)) for node in range(len(tree.tokens))), default=0) <= depth


@given(forests, st.integers(1, 12), st.sampled_from([0.04, 0.2, 0.5]))
def test_a_tree_without_its_unlikely_nodes_has_the_likely_ones_and_all_first_tokens(
    offered, max_draft_tokens: int, least: float
):
    whole, cut = (
        grow_tree(forest(offered), 99, 4),
        grow_tree(forest(offered), max_draft_tokens, 4, min_expected_tokens=least),
    )
    kept = [
        (path(whole, node), value)
        for node, value in enumerate(whole.expected_tokens)
        if value >= least or whole.parents[node] == -1
    ]
    assert [(path(cut, node), value) for node, value in enumerate(cut.expected_tokens)] == kept[:max_draft_tokens]


def test_nothing_offered_is_the_empty_tree():
    assert grow_tree([], 5, 5) == Tree(*((),) * 8)
    assert (
        grow_tree([Branch([], [])], 5, 5)
        == grow_tree([Branch([1], [0.5])], 0, 5)
        == grow_tree([Branch([1], [0.5])], 5, 0)
    )


def test_the_source_that_trusts_a_token_most_speaks_for_it():
    offered = [Branch([1, 2], [0.3, 0.9], "shy"), Branch([1, 3], [0.6, 0.1], "bold")]
    tree = grow_tree(offered, 9, 9)
    assert tree.tokens == (1, 2, 3)
    assert tree.sources == ("bold", "shy", "bold")
    assert tree.acceptance_probabilities == (0.6, 0.9, 0.1)
    assert tree.expected_tokens == pytest.approx((0.6, 0.54, 0.06))


def test_chances_are_calibrated_but_kept_as_stated():
    tree = grow_tree([Branch([1, 2], [0.5, 0.5], "a")], 9, 9, lambda source, chance: chance / 5)
    assert tree.expected_tokens == pytest.approx((0.1, 0.01))
    assert tree.acceptance_probabilities == (0.5, 0.5)


def test_a_draft_that_is_worth_asking_for_is_asked_before_an_unlikely_one():
    chain, other = Branch([1, 2, 3], [0.01] * 3, "chain", payoffs=[0.1] * 3), Branch([4], [0.05], "other")
    assert grow_tree([chain, other], 3, 9).tokens == (1, 2, 3)
    assert grow_tree([chain, other], 3, 9, calibrate_payoff=lambda source, worth: worth / 10).tokens[0] == 4


def test_equal_draws_from_laws_of_their_own_stay_two_tries():
    distribution = one_hot(1)
    drawn, chosen = Branch([1], [0.5], distributions=[distribution]), Branch([1], [0.4])
    for offered in ([drawn, drawn, chosen, chosen], [chosen, drawn, drawn], [drawn, chosen, drawn]):
        tree = grow_tree(offered, 9, 9)
        assert tree.tokens == (1, 1, 1)
        assert [known is distribution for known in tree.distributions] == [True, True, False]


@given(forests, st.integers(0, 10))
def test_the_shape_of_a_tree_does_not_depend_on_what_was_drawn(offered, max_draft_tokens: int):
    """The place of a drawn token in the tree, its presence too, must not depend on the token (see `reject`)."""
    distributions = [one_hot(0)] * 4
    drawn = [
        Branch(b.tokens, b.acceptance_probabilities, b.source, distributions[: len(b.tokens)], b.payoffs)
        for b in forest(offered)
    ]
    other = [
        Branch([5 + token for token in b.tokens], b.acceptance_probabilities, b.source, b.distributions, b.payoffs)
        for b in drawn
    ]
    assert grow_tree(drawn, max_draft_tokens, 3).parents == grow_tree(other, max_draft_tokens, 3).parents


@given(forests, st.lists(st.integers(0, 2), max_size=5))
def test_following_tokens_finds_their_nodes(offered, tokens: list[int]):
    tree = grow_tree(forest(offered), 50, 9)
    inputs = ForwardInputs(continuation([1], 9), tree.tokens, tree.parents)
    nodes = inputs.matching_nodes(tokens)
    assert inputs.path_tokens(nodes[-1] if nodes else -1) == tokens[: len(nodes)]
    paths = {path(tree, node) for node in range(len(tree.tokens))}
    assert len(nodes) == max((n for n in range(len(tokens) + 1) if n == 0 or tuple(tokens[:n]) in paths), default=0)
    assert np.array_equal([inputs.depths[node] for node in nodes], range(len(nodes)))
