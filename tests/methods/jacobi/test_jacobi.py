"""Jacobi decoding: the iteration, its blocks, its recycled n-grams."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saltus.core.batch import run
from saltus.core.canvas import continuation
from saltus.core.control.controller import Controller
from saltus.core.coupling import pick_token
from saltus.core.distributions import Step, TargetDistributions
from saltus.core.forward import ForwardInputs
from saltus.core.noise import Noise
from saltus.core.rules import match, reject
from saltus.core.sampling import Sampling, token_distribution
from saltus.core.speculate import speculate
from saltus.methods.jacobi.block_window import BlockWindow, FrozenBlocks
from saltus.methods.jacobi.drafter import (
    Guess,
    Iterate,
    Jacobi,
    JacobiDrafter,
    nodes_of_next_iterate,
)
from saltus.methods.jacobi.ngram_pool import NGRAMS_PER_TOKEN, NgramPool
from saltus.testing import ToyNetwork, recording_noise, toy_decoding, toy_network

PROMPT = [1, 2, 3, 4]
SAMPLED = Sampling(temperature=1.0)
ALONE = {"candidates": 0, "max_blocks": 1}  # one block, no recycling: the iteration of Eq. 3 itself


def write(
    length: int = 30, target: ToyNetwork | None = None, max_draft_tokens: int = 64, method: str = "jacobi", **options
):
    settings = {name: options.pop(name) for name in ("seed", "sampling", "rule", "controller") if name in options}
    settings.setdefault("controller", Controller(max_draft_tokens, adaptive=False))
    options = {"jacobi": options}
    return toy_decoding(method, PROMPT, length, target=target or toy_network(), options=options, **settings).run()


def chains(written) -> list[list[int]]:
    """The path down the first children of each step: without recycling, all that was asked."""
    found = []
    for step in written.steps:
        node, chain = -1, []
        while children := step.inputs.children(node):
            node = children[0]
            chain.append(step.inputs.tokens[node])
        found.append(chain)
    return found


def blind() -> ToyNetwork:
    """A law that does not look at the text: every guess but the first is right."""
    return ToyNetwork(torch.tensor([0.3, 0.1, 0.0, 0.2, 0.4]).log().clamp_min(-9).double().expand(5, 5, 5).contiguous())


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "T=1"])
@pytest.mark.parametrize("block", [1, 2, 5, 8])
def test_the_chain_is_the_iterate_of_the_papers_equation(block: int, sampling: Sampling):
    """Against Eq. 3 done by hand: all guesses of a block are corrected at once, each from the guesses before it."""
    target, noise, holes = toy_network(logit_scale=1.0), Noise(7), 3 * block + 1
    written = write(holes, toy_network(logit_scale=1.0), seed=7, sampling=sampling, block_size=block, **ALONE)
    text, guess, inputs = list(PROMPT), [], []
    while (done := len(text) - len(PROMPT)) < holes:
        end = (done // block + 1) * block
        for hole in range(done + len(guess), min(end, holes - 1)):
            guess.append(text[int(noise.uniforms("jacobi/guess", len(PROMPT) + hole) * len(text))])
        chain, answers = guess[: min(end, holes - 1) - done], []
        for i in range(len(chain) + 1):
            before = text + chain[:i]
            here = token_distribution(target.logits[before[-2], before[-1]], sampling)
            answers.append(pick_token(here, noise, "text", len(before)))
        right = next((i for i in range(len(chain)) if chain[i] != answers[i]), len(chain))
        inputs.append(chain)
        text += answers[: right + 1]
        guess = answers[right + 1 :] + guess[len(answers) :]
    assert chains(written) == inputs
    assert written.tokens == text[len(PROMPT) :]


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "T=1"])
def test_a_block_takes_at_most_as_many_calls_as_it_has_tokens(sampling: Sampling):
    for seed in range(10):
        for block in (1, 3, 8):
            written = write(24, toy_network(logit_scale=1.0), seed=seed, sampling=sampling, block_size=block)
            starts = np.array([step.canvas.num_decided for step in written.steps])
            assert all(
                ((starts >= first) & (starts < first + block)).sum() <= block + 1 for first in range(0, 24, block)
            )


def test_guesses_that_do_not_depend_on_the_text_settle_in_one_call():
    written = write(31, blind(), sampling=SAMPLED, block_size=10, seed=3, **ALONE)
    per_block = [sum(first <= step.canvas.num_decided < first + 10 for step in written.steps) for first in (0, 10, 20)]
    assert max(per_block) <= 3


def test_every_block_beyond_the_second_is_live_too():
    """The published code loses blocks beyond K = 2; a chain of K blocks holds K blocks."""
    for blocks in (1, 2, 3, 5):
        written = write(60, blind(), sampling=SAMPLED, block_size=6, max_blocks=blocks, spawn_ratio=0.0, candidates=0)
        assert max(map(len, chains(written))) == 6 * blocks
    calls = [
        len(write(120, blind(), sampling=SAMPLED, block_size=6, max_blocks=blocks, spawn_ratio=0.0, candidates=0).steps)
        for blocks in (1, 2, 3)
    ]
    assert calls[0] > calls[1] > calls[2]


def test_a_block_starts_when_enough_of_the_one_before_is_decided_or_settled():
    window = BlockWindow(size=10, max_blocks=3, spawn_threshold=9, sliding=False)
    assert window.end(0, [False] * 10) == 10
    assert window.end(4, [True] * 4 + [False] * 2) == 10, "8 of 10"
    assert window.end(4, [True] * 5 + [False]) == 20, "9 of 10"
    assert window.end(9, [False] + [True] * 8 + [False] * 2) == 20, "the gap counts"
    assert window.end(9, [True] * 10 + [False]) == 30, "a later block, settled but not decided, lets the third start"
    assert window.end(12, [False] * 18) == 30, "the first is finished: two are live"
    assert window.end(31, []) == 40


@given(st.lists(st.integers(1, 7), min_size=1, max_size=30), st.integers(1, 8), st.integers(1, 4), st.booleans())
def test_a_window_always_covers_the_next_hole_and_at_most_its_blocks(steps, size: int, most: int, running: bool):
    window, done = BlockWindow(size, most, size, running), 0
    for step in steps:
        end = window.end(done, [bool(step % 2)] * size)
        assert done < end <= done + most * size
        done += step


def test_a_running_window_keeps_its_length():
    written = write(60, toy_network(logit_scale=1.0), sampling=SAMPLED, block_size=7, sliding=True, **ALONE)
    max_depths = [len(step.canvas.open_positions) - 1 for step in written.steps]
    assert [len(chain) for chain in chains(written)] == [min(7, max_depth) for max_depth in max_depths]
    shrinking = write(60, toy_network(logit_scale=1.0), sampling=SAMPLED, block_size=7, **ALONE)
    assert min(len(chain) for chain in chains(shrinking)[:-7]) < 7


def test_frozen_blocks_are_those_of_algorithm_1():
    """Blocks of four, by hand: accept on trial, freeze, spawn with a clone, promote and verify anew."""
    window = FrozenBlocks(size=4, max_blocks=2, spawn_threshold=2)
    assert window.end(1, []) == 4
    assert window.end(2, []) == 8, "two of four are decided"
    assert [window.first_guess(hole, 2, [7, 8]) for hole in (4, 5, 6, 7)] == [7, 8, None, None]
    # Holes 2 to 7 were evaluated: block two matches in its first token, and takes the model's token after it.
    assert window.keep_frozen(2, [7, 8, 7, 8, 1, 1], [7, 9, 7, 5, 6, 6, 4]) == [7, 9, 7, 5, 6, 6, 4]
    assert window.accepted == [2]
    assert window.end(3, []) == 8
    # Holes 3 to 7: the accepted tokens 7 and 5 stay, whatever the model would now say, and 6 is right.
    assert window.keep_frozen(3, [9, 7, 5, 6, 6], [9, 1, 2, 6, 3]) == [9, 7, 5, 6, 3]
    assert window.accepted == [4]
    assert window.end(4, []) == 8, "promoted: nothing is frozen any more"
    assert window.accepted == []
    assert window.keep_frozen(4, [7, 5, 6, 3], [1, 2, 6, 3]) == [1, 2, 6, 3]


def test_a_third_block_starts_when_the_second_has_accepted_enough():
    window = FrozenBlocks(size=4, max_blocks=3, spawn_threshold=3, accepted=[3])
    assert window.end(0, []) == 12
    assert window.end(5, []) == 12, "the first is finished"
    assert window.end(7, []) == 16


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "T=1"])
@pytest.mark.parametrize("recycle", ["tails", "diagonals"])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_frozen_blocks_write_the_text_of_plain_decoding(blocks: int, recycle: str, sampling: Sampling):
    for seed in range(3):
        settings = {"sampling": sampling, "seed": seed}
        plain = write(60, toy_network(logit_scale=1.0), method="plain", **settings)
        options = {
            "multi_block": "frozen",
            "max_blocks": blocks,
            "block_size": 6,
            "spawn_ratio": 0.5,
            "recycle": recycle,
        }
        frozen = write(60, toy_network(logit_scale=1.0), **settings, **options)
        assert frozen.tokens == plain.tokens
        assert len(frozen.steps) < len(plain.steps)
    options |= {"spawn_ratio": 0.0, "candidates": 0}
    live = write(60, toy_network(logit_scale=1.0), sampling=sampling, **options)
    assert 6 * (blocks - 1) < max(map(len, chains(live))) <= 6 * blocks


def test_a_frozen_guess_stays_until_its_block_is_the_first_one():
    """Where nothing depends on the text, the second block is accepted at once, and verified in one call."""
    settings = {"sampling": SAMPLED, "block_size": 10, "spawn_ratio": 0.0, "candidates": 0}
    frozen, one = (len(write(101, blind(), multi_block="frozen", max_blocks=n, **settings).steps) for n in (2, 1))
    assert frozen < one


def test_first_guesses_come_from_the_text_and_its_seed_alone():
    first = [chains(write(20, seed=seed, block_size=12, **ALONE))[0] for seed in (0, 0, 1)]
    assert first[0] == first[1] != first[2]
    assert set(first[0]) | set(first[2]) <= set(PROMPT)


def test_a_chain_that_was_cut_short_goes_on_where_it_was():
    """Holes behind the last answer keep their guesses."""
    iterate = Iterate(ngram_size=4)
    iterate.guesses = [Guess((token,)) for token in (5, 6, 7, 8)]
    iterate.correct([5, 6], [5, 9, 1])
    assert iterate.tokens == [5, 9, 1, 8]
    assert [guess.corrected for guess in iterate.guesses] == [True, True, True, False]
    assert iterate.settled == [True, False, False, False]


def test_a_drafter_that_was_not_asked_for_some_calls_goes_on_at_the_right_hole():
    """Its guesses for holes that were decided meanwhile are gone; the last call has answered the next ones."""
    drafter = Jacobi(block_size=6, **ALONE).drafter(Noise(0), SAMPLED, match)
    guesses = drafter(continuation(PROMPT, 20), None, 6)[0].tokens
    written = write(3, toy_network(logit_scale=1.0), method="plain", sampling=SAMPLED).tokens
    later = continuation(PROMPT, 20).fill(np.array(written[:2]))
    inputs = ForwardInputs(later, tokens=(4, 5), parents=(-1, 0))
    target = toy_network(logit_scale=1.0)
    distributions = TargetDistributions(inputs, target.forward([inputs], [target.new_kv_cache()])[0], SAMPLED, Noise(0))
    last = Step(later, inputs, distributions.outputs, distributions, np.array(written[2:]), -1)
    chain = drafter(later.fill(last.tokens), last, 6)[0].tokens
    assert chain[:3] == [distributions.pick(0), distributions.pick(1), guesses[5]]


def test_a_guess_ends_the_answers_that_led_to_it():
    """Each token of a trail is the answer to the one before it, a call earlier."""
    iterate = Iterate(ngram_size=3)
    iterate.guesses = [Guess((token,)) for token in (5, 6, 7)]
    iterate.correct([5, 6, 7], [1, 2, 3, 4])
    assert [guess.ngram for guess in iterate.guesses] == [(1,), (5, 2), (6, 3), (7, 4)]
    iterate.correct([1, 2, 3, 4], [8, 8, 8, 8, 8])
    assert [guess.ngram for guess in iterate.guesses] == [(8,), (1, 8), (5, 2, 8), (6, 3, 8), (7, 4, 8)]


def tails(pool: NgramPool, token: int, count: int = 99) -> list[tuple[int, ...]]:
    return [tail for tail, _ in pool.starting_with(token, count)]


@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=4), max_size=60), st.integers(1, 20))
def test_the_pool_is_bounded(ngrams, most: int):
    pool = NgramPool(most)
    for ngram in ngrams:
        pool.add(tuple(ngram))
        assert tails(pool, ngram[0], 1) == [tuple(ngram[1:])], "the latest is there, and first"
        assert pool.size == sum(map(len, pool.continuations.values())) <= most
        assert all(0 < len(kept) <= NGRAMS_PER_TOKEN for kept in pool.continuations.values())


def test_a_full_pool_forgets_what_was_not_added_to_for_longest():
    pool = NgramPool(capacity=3)
    for ngram in [(1, 2), (1, 3), (2, 2), (1, 4), (4, 4, 4)]:
        pool.add(ngram)
    assert [tails(pool, token) for token in (1, 2, 4)] == [[(4,), (3,)], [], [(4, 4)]]


def test_an_ngram_takes_the_place_of_the_one_it_has_grown_from():
    pool = NgramPool(capacity=9)
    for ngram in [(1, 2), (1, 5), (1, 2, 3)]:
        pool.add(ngram)
    assert tails(pool, 1) == [(2, 3), (5,)]


def test_the_latest_recycled_ngrams_come_first_and_agreeing_ones_are_likelier():
    pool = NgramPool(capacity=9)
    for last in (1, 2, 3):
        pool.add((0, last))
    assert tails(pool, 0, 2) == [(3,), (2,)]
    probabilities = [chance[0] for _, chance in pool.starting_with(0, 9)]
    assert probabilities == sorted(probabilities, reverse=True)
    pool.add((0, 3, 4))
    pool.add((0, 3, 5))
    assert pool.starting_with(0, 9)[0][1][0] > probabilities[0]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20))
def test_chances_of_recycled_ngrams_are_chances(firsts):
    pool = NgramPool(capacity=99)
    for first in firsts:
        pool.add((9, first))
    found = {tail[0]: probabilities[0] for tail, probabilities in pool.starting_with(9, 99)}
    assert all(0 < chance < 1 for chance in found.values())
    assert sum(found.values()) < 1


@pytest.mark.parametrize("block", [2, 5])
def test_a_recycled_tail_is_consecutive_tokens_of_one_earlier_iterate_up_to_a_block_long(block: int, monkeypatch):
    """Every continuation follows its key within an iterate before the latest one."""
    offered, iterates, find, branch = [], [], NgramPool.starting_with, JacobiDrafter.branch

    def record(pool, key, count):
        offered.append((key, find(pool, key, count)))
        return offered[-1][1]

    monkeypatch.setattr(NgramPool, "starting_with", record)
    monkeypatch.setattr(
        JacobiDrafter, "branch", lambda self, chain: iterates.append([*self.iterate.guesses]) or branch(self, chain)
    )
    write(60, toy_network(logit_scale=1.5), sampling=SAMPLED, block_size=block, recycle="tails", max_blocks=1)
    runs = [(key, *(guess.ngram[-1] for guess in chain)) for (key, _), chain in zip(offered, iterates, strict=True)]
    for number, (key, found) in enumerate(offered):
        for tail, _ in found:
            run = key, *tail
            assert any(before[i : i + len(run)] == run for before in runs[:number] for i in range(len(before)))
    assert max(len(tail) for _, found in offered for tail, _ in found) == block


def test_tails_and_diagonals_write_the_same_text():
    for sampling in (Sampling(), SAMPLED):
        texts = [
            write(40, toy_network(logit_scale=1.5), sampling=sampling, recycle=recycle).tokens
            for recycle in ("tails", "diagonals")
        ]
        assert texts[0] == texts[1] == write(40, toy_network(logit_scale=1.5), method="plain", sampling=sampling).tokens


@pytest.mark.slow
def test_recycled_ngrams_start_with_the_last_decided_token_and_are_verified_in_the_same_call(monkeypatch):
    """A branch beside the chain, taken at least once, saves calls."""
    looked_up, find = [], NgramPool.starting_with
    monkeypatch.setattr(NgramPool, "starting_with", lambda pool, *key: looked_up.append(key[0]) or find(pool, *key))
    written = write(20, toy_network(logit_scale=1.5), sampling=SAMPLED)
    assert looked_up == [step.canvas.decided_prefix[-1] for step in written.steps][: len(looked_up)]

    target = partial(toy_network, logit_scale=1.5)
    taken = 0
    for seed in range(10):
        written = write(40, target(), seed=seed, sampling=SAMPLED, block_size=8, spawn_ratio=1.0)
        for step in written.steps:
            path = step.inputs.path_tokens(step.last_node)
            taken += bool(path) and step.inputs.children(-1)[0] not in step.inputs.matching_nodes(path)
    assert taken
    plain = [len(write(40, target(), seed=s, sampling=SAMPLED, block_size=8, candidates=0).steps) for s in range(10)]
    recycled = [len(write(40, target(), seed=s, sampling=SAMPLED, block_size=8, candidates=4).steps) for s in range(10)]
    assert sum(recycled) < sum(plain)


def test_a_chain_goes_on_along_the_branch_that_the_text_took():
    """Where another drafter's branch was right, the answers on it are the next iterate; else those on the chain."""
    inputs = ForwardInputs(continuation(PROMPT, 9), tokens=(1, 2, 2, 3, 4, 5), parents=(-1, 0, -1, 2, 3, 2))
    step = write(1).steps[0]
    ours, theirs = [1, 2, 3], [2, 3, 4]
    for node, expected in {-1: [0, 1], 0: [0, 1], 1: [0, 1], 2: [2, 3, 4], 3: [2, 3, 4], 5: [2, 5]}.items():
        assert nodes_of_next_iterate(replace(step, inputs=inputs, last_node=node), ours) == expected
    assert nodes_of_next_iterate(replace(step, inputs=inputs, last_node=-1), theirs) == [2, 3, 4]
    assert nodes_of_next_iterate(replace(step, inputs=inputs, last_node=-1), [9]) == [0, 1], (
        "our chain was not asked: any answers beat none"
    )
    assert nodes_of_next_iterate(replace(step, inputs=ForwardInputs(continuation(PROMPT, 9)), last_node=-1), ours) == []


def test_jacobi_stays_off_the_uniforms_that_judge_it():
    """Under `reject` the text's uniforms and those of acceptance must not have shaped the drafts."""
    heard: list[tuple[str, int]] = []
    noise = Noise(0)
    drafter = Jacobi().drafter(recording_noise(heard)(0), SAMPLED, reject)
    run(
        speculate(continuation(PROMPT, 20), noise, SAMPLED, [drafter], lambda step: None, reject),
        {"target": toy_network(logit_scale=1.0)},
    )
    assert {stream for stream, _ in heard} == {"jacobi/guess"}


def test_a_fixed_point_is_asked_for_only_as_deep_as_there_is_room():
    for step in write(9, block_size=64, seed=1).steps:
        assert max(step.inputs.depths, default=-1) < len(step.canvas.open_positions) - 1


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("block_size", 0),
        ("max_blocks", 0),
        ("spawn_ratio", 1.5),
        ("spawn_ratio", -0.1),
        ("ngram_size", 1),
        ("ngram_pool_size", 0),
        ("candidates", -1),
        ("recycle", "all"),
        ("multi_block", "both"),
    ],
)
def test_options_out_of_range_are_refused_in_a_line(option: str, value):
    with pytest.raises(ValueError, match=rf"^jacobi: {option} is {value!r}, but .*$"):
        Jacobi(**{option: value})


def test_a_running_block_cannot_be_frozen():
    with pytest.raises(ValueError, match="no later blocks to freeze"):
        Jacobi(sliding=True, multi_block="frozen")
