"""Chains for engines that cannot verify trees, and the cost of their steps."""

import pytest

from saltus.core.tree import Branch, grow_tree
from saltus.integrations.step_cost import StepCost
from saltus.integrations.vllm.chains import best_chain, lengths_that_pay


def chain(*probabilities: float):
    return grow_tree([Branch(list(range(len(probabilities))), list(probabilities))], 16, 16)


def test_the_best_chain_may_begin_with_a_token_that_is_not_the_likeliest():
    tree = grow_tree([Branch([1], [0.5]), Branch([2, 3, 4], [0.4, 0.9, 0.9])], 16, 16)
    found = best_chain(tree)
    assert found.tokens == (2, 3, 4)
    assert found.parents == (-1, 0, 1)
    assert found.expected_tokens == pytest.approx((0.4, 0.36, 0.324))


def test_a_tree_without_nodes_has_an_empty_chain():
    assert best_chain(grow_tree([], 16, 16)).tokens == ()


def test_drafts_that_cost_more_than_they_save_are_not_verified():
    assert lengths_that_pay([chain(0.5, 0.5)], lambda rows: float(rows)) == [0]
    assert lengths_that_pay([chain(0.5, 0.5)], lambda rows: 1.0) == [2]


def test_texts_of_a_batch_compete_for_the_rows_that_pay():
    sure, unsure = chain(0.9, 0.9, 0.9), chain(0.3, 0.3)
    assert lengths_that_pay([unsure, sure], lambda rows: 1 + 0.2 * rows) == [0, 3]


def test_no_texts_need_no_drafts():
    assert lengths_that_pay([], lambda rows: 1.0) == []


def test_the_cost_of_rows_is_learned_from_steps():
    cost = StepCost()
    for step in range(200):
        rows = 1 + step % 9
        cost.record(rows, 0.010 + 0.003 * rows)
    assert cost.seconds_for(1) == pytest.approx(0.013, rel=0.1)
    assert cost.seconds_for(9) == pytest.approx(0.037, rel=0.1)


def test_a_slow_first_step_is_forgotten():
    cost = StepCost()
    cost.record(1, 10.0)
    for step in range(60):
        rows = 1 + step % 9
        cost.record(rows, 0.010 + 0.001 * rows)
    assert cost.seconds_for(1) == pytest.approx(0.011, rel=0.2)
    assert cost.seconds_for(9) == pytest.approx(0.019, rel=0.2)


def test_rows_that_once_seemed_expensive_are_tried_again():
    """Without drafts all steps have one row, so nothing is learned of more rows."""
    cost = StepCost()
    for step in range(200):
        cost.record(1 + step % 9, 0.010 * (1 + step % 9))
    assert cost.slope > 0.5 * cost.seconds_for(1)
    for _ in range(600):
        cost.record(1, 0.010)
    assert cost.slope < 0.05 * cost.seconds_for(1)
