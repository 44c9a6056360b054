"""The controller: what it learns of drafts and calls, and the sizes it chooses by that."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saltus.core.batch import SequenceState, run, run_batch
from saltus.core.canvas import continuation
from saltus.core.control.acceptance import Acceptance
from saltus.core.control.call_cost import CallCost, never_falling
from saltus.core.control.controller import EMPTY_TREE, Controller
from saltus.core.control.drafting_switch import DraftingSwitch
from saltus.core.distributions import Step, TargetDistributions
from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.core.noise import Noise
from saltus.core.picking import one_hot
from saltus.core.sampling import Sampling
from saltus.core.speculate import speculate
from saltus.core.tree import Branch, Tree, grow_tree
from saltus.methods.shared.hidden_state_drafter import MAX_UNREAD
from saltus.methods.shared.query_chains import with_query_chains
from saltus.testing import ToyNetwork, toy_decoding, toy_network
from saltus.training.data.seeded_generator import seeded_generator

PROMPT = [1, 2, 3]
SAMPLED = Sampling(temperature=1.0)


def chain(values: list[float], drawn: bool = False) -> Tree:
    """A chain whose nodes have these values."""
    probabilities = [value / before for value, before in zip(values, [1.0, *values], strict=False)]
    tokens = list(range(len(values)))
    return grow_tree([Branch(tokens, probabilities, "a", [one_hot(0)] * len(values) if drawn else None)], 99, 99)


values = st.lists(st.floats(0.01, 1), max_size=8).map(lambda drawn: sorted(drawn, reverse=True))
seconds = st.dictionaries(st.integers(1, 12), st.floats(0.5, 3), max_size=6)


# ------------------------------------------------------------------------------------------------------------- costs


def test_costs_are_straight_lines_between_what_was_measured():
    costs = CallCost({1: 1.0, 5: 2.0, 9: 6.0})
    assert [costs.seconds_for(rows) for rows in (1, 3, 5, 6, 9)] == pytest.approx([1.0, 1.5, 2.0, 3.0, 6.0])
    assert costs.seconds_for(11) == pytest.approx(6 + 2 * 5 / 8), "beyond, as steep as on the whole"
    assert CallCost({4: 2.0, 8: 3.0}).seconds_for(1) == 2.0, "below, as the narrowest"


def test_without_measurements_a_row_costs_two_percent():
    assert CallCost().seconds_for(5) == pytest.approx(1.10)


def test_costs_follow_the_calls_and_an_outlier_moves_them_little():
    costs = CallCost({1: 1.0, 8: 1.0})
    for _ in range(100):
        costs.record(8, 1.5)
    assert costs.seconds_for(8) == pytest.approx(1.5, rel=0.01)
    costs.record(8, 1000.0)
    assert costs.seconds_for(8) < 1.7


def test_a_calibration_in_a_disturbed_moment_is_put_right_as_a_whole():
    costs = CallCost({1: 5.0, 8: 10.0})
    for _ in range(60):
        costs.record(1, 1.0)
    assert costs.seconds_for(1) == pytest.approx(1.0, rel=0.05)
    assert costs.seconds_for(8) == pytest.approx(2.0, rel=0.1), "else no draft would be tried, and nothing learned"


def test_a_machine_under_load_slows_calls_of_all_sizes_and_their_ratio_is_learned_too():
    costs = CallCost({1: 1.0, 8: 2.0})
    for _ in range(200):
        costs.record(1, 3.0)  # under load, and no other size is used
    assert costs.seconds_for(8) > 3.0, "else drafts would seem cheap"
    for _ in range(400):
        costs.record(1, 1.0)
    assert costs.seconds_for(8) == pytest.approx(2.0, rel=0.05), "else drafts would seem dear, and none would be tried"
    for number in range(800):
        costs.record((1, 8)[number % 2], (1.0, 4.0)[number % 2])
    assert costs.seconds_for(1) == pytest.approx(1.0, rel=0.1)
    assert costs.seconds_for(8) == pytest.approx(4.0, rel=0.1)


def test_a_machine_under_load_does_not_make_draft_tokens_cheap():
    """For 60 calls everything takes twice the time, then for 60 what it took before; a draft costs 0.7 tokens."""
    costs = CallCost({rows: 0.3 + 0.7 * rows for rows in (1, 2, 4, 8)})
    controller, wrong = Controller(call_cost=costs, batch_size=16), 0
    for number in range(1200):
        load, rows = (1.0, 2.0)[number // 60 % 2], (1, 1, 1, 1, 1, 2)[number % 6]
        costs.record(rows, load * (0.3 + 0.7 * rows))
        wrong += controller.can_pay()
    assert wrong == 0


def busy_machine(seed: int) -> Iterator[float]:
    """By what calls take longer: bursts of some hundred calls, and now and then one for up to two calls' time."""
    dice = np.random.default_rng(seed)
    while True:
        for load in (1.0, 1 + min(dice.pareto(2.0), 2.5)):
            for _ in range(int(dice.exponential(150))):
                yield load * (1 + min(0.03 * (1 + dice.pareto(1.5)), 2) + abs(dice.normal(0, 0.03)))


def calls_of(
    controller: Controller, draft_cost: Callable[[float], float], calls: int = 1000, always: bool = False
) -> list[float]:
    """Draft tokens of a text in each call, on a busy machine where they cost so much of a plain call's time.

    Half of the texts' steps have drafts, or all of them.
    """
    dice, load, sizes = np.random.default_rng(1), busy_machine(2), []
    tree = chain([0.8, 0.6, 0.4])
    for number in range(calls):
        looking, nodes = controller.can_pay(), 0
        for _ in range(controller.batch_size if looking else 0):
            nodes += controller.num_nodes(tree) if always or dice.random() < 0.5 else 0
        sizes.append(nodes / controller.batch_size)
        controller.call_cost.record(1 + sizes[-1], (1 + draft_cost(number / calls) * sizes[-1]) * next(load))
    return sizes


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_drafts_that_a_calibration_makes_too_dear_are_tried(batch_size: int):
    costs = CallCost({1: 1.0, 2: 2.5, 4: 5.5})
    sizes = calls_of(Controller(call_cost=costs, batch_size=batch_size), lambda when: 0.2)
    assert sizes[0] == 0
    assert np.mean(np.array(sizes[600:]) > 0) > 0.45, "half of the steps of a text have drafts"
    assert costs.seconds_for(2) / costs.seconds_for(1) == pytest.approx(1.2, abs=0.1)


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_drafts_that_a_calibration_makes_too_cheap_are_left_out(batch_size: int, always: bool):
    """Also where every call has drafts: now and then one has none, to see what the others take more."""
    costs = CallCost({1: 1.0, 2: 1.3, 4: 1.9})
    sizes = calls_of(Controller(call_cost=costs, batch_size=batch_size), lambda when: 1.0, always=always)
    assert sum(sizes[:20]) > 5
    assert np.mean(np.array(sizes[700:]) > 0) < 0.1


@pytest.mark.parametrize(("before", "after"), [(0.2, 0.9), (0.9, 0.2)])
def test_what_drafts_cost_is_learned_again_when_it_changes(before: float, after: float):
    costs = CallCost({1: 1.0, 2: 1 + before, 4: 1 + 3 * before})
    sizes = calls_of(Controller(call_cost=costs, batch_size=4), lambda when: before if when < 0.5 else after, 2000)
    drafted = [np.mean(np.array(sizes[begin:end]) > 0) for begin, end in ((0, 1000), (1600, 2000))]
    assert (drafted[0] > 0.8 and drafted[1] < 0.1) if before < after else (drafted[0] < 0.1 and drafted[1] > 0.8)


def test_trials_of_another_size_are_few():
    """On a machine whose costs are known: 2 % of the calls in which drafts do not pay have some."""
    sizes = calls_of(Controller(call_cost=CallCost({1: 1.0, 2: 2.0, 4: 4.0})), lambda when: 1.0, 3000)
    assert np.mean(np.array(sizes) > 0) < 0.02
    sizes = calls_of(Controller(call_cost=CallCost({1: 1.0, 2: 1.2, 4: 1.6})), lambda when: 0.2, 3000, always=True)
    assert np.mean(np.array(sizes) == 0) < 0.03


# -------------------------------------------------------------------------------------------------------------- sizes


@given(values, seconds, st.integers(0, 10))
def test_the_size_is_the_one_with_the_most_expected_tokens_a_second(values, seconds, max_draft_tokens: int):
    controller = Controller(max_draft_tokens=max_draft_tokens, call_cost=CallCost(seconds))
    size = controller.num_nodes(chain(values))
    rates = [
        (1 + sum(values[:n])) / controller.call_cost.seconds_for(n + 1)
        for n in range(min(len(values), max_draft_tokens) + 1)
    ]
    assert rates[size] == pytest.approx(max(rates))


@given(values, st.lists(st.floats(0.01, 1), max_size=4), seconds)
def test_with_drafts_of_their_own_laws_no_node_is_dropped_for_what_comes_after_it(values, later, seconds):
    """Whether node n stays is a function of the nodes up to n."""
    controller = Controller(max_draft_tokens=99, call_cost=CallCost(seconds))
    more = [*values, *sorted((value * min(values, default=1.0) for value in later), reverse=True)]
    short, long = (controller.num_nodes(chain(some, drawn=True)) for some in (values, more))
    assert min(long, len(values)) == short


@given(values, seconds)
def test_nodes_below_the_least_that_a_row_costs_are_never_chosen(values: list[float], seconds: dict[int, float]):
    controller = Controller(99, call_cost=CallCost(never_falling({1: 0.5, **seconds})))
    chosen = controller.num_nodes(chain(values))
    assert all(value >= controller.min_expected_tokens() for value in values[:chosen])


def test_nothing_is_left_out_where_rows_are_free_or_whole_trees_are_verified():
    assert Controller(call_cost=CallCost({1: 2.0, 8: 2.0, 16: 3.0})).min_expected_tokens() == 0
    assert Controller(adaptive=False, call_cost=CallCost({1: 2.0, 8: 3.0})).min_expected_tokens() == 0
    assert Controller(call_cost=CallCost({1: 2.0, 3: 3.0, 5: 3.4})).min_expected_tokens() == pytest.approx(0.1)


def test_a_drafter_that_was_wrong_for_long_is_trusted_again_when_it_is_right():
    """Its first token is recorded in every step, though no row is spent on it."""
    controller = Controller(31, call_cost=CallCost({1: 1.0, 4: 1.06, 16: 1.3, 32: 1.6}))

    def step(right: bool) -> int:
        calibrated = controller.calibrated_probability, controller.calibrated_payoff
        offered = grow_tree([Branch([7, 8], [0.9, 0.9], "a")], 31, 2, *calibrated, controller.min_expected_tokens())
        controller.acceptance.record("a", 0.9, right) if offered.tokens else None
        return controller.num_nodes(offered)

    assert step(True) > 0
    assert [step(False) for _ in range(600)][-1] == 0
    assert [step(True) for _ in range(200)][-1] > 0


def test_free_nodes_are_all_taken_and_dear_ones_are_not():
    tree = chain([0.5, 0.25, 0.1])
    assert Controller(call_cost=CallCost({1: 1.0, 4: 1.0})).num_nodes(tree) == 3
    assert Controller(call_cost=CallCost({1: 1.0, 4: 10.0})).num_nodes(tree) == 0
    assert Controller(call_cost=CallCost({1: 1.0, 4: 10.0}), adaptive=False).num_nodes(tree) == 3
    assert Controller(adaptive=False, max_draft_tokens=2).num_nodes(tree) == 2


# --------------------------------------------------------------------------------------------------------- acceptance


@pytest.mark.slow
@given(st.sampled_from([0.1, 0.5, 0.9]), st.floats(0, 1))
def test_chances_converge_to_how_often_drafts_are_right(stated: float, truth: float):
    acceptance, dice = Acceptance(), np.random.default_rng(0)
    for _ in range(1500):
        acceptance.record("a", stated, bool(dice.random() < truth))
    assert acceptance.calibrated_probability("a", stated) == pytest.approx(min(truth, 0.99), abs=0.12)
    assert acceptance.calibrated_probability("b", stated) == stated


def test_a_source_without_a_record_is_believed():
    assert Acceptance().calibrated_probability("new", 0.37) == pytest.approx(0.37)
    assert Acceptance().calibrated_payoff("new/chain", 0.06) == pytest.approx(0.06)


def test_low_and_high_chances_are_corrected_apart():
    acceptance = Acceptance()
    for _ in range(300):
        acceptance.record("a", 0.1, True)
        acceptance.record("a", 0.9, False)
    assert acceptance.calibrated_probability("a", 0.1) > 0.5
    assert acceptance.calibrated_probability("a", 0.9) < 0.2


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=60), st.floats(0, 1))
def test_a_calibrated_chance_is_a_chance(observed, stated: float):
    acceptance = Acceptance()
    for chance, right in observed:
        acceptance.record("a", chance, right)
    assert 0 <= acceptance.calibrated_probability("a", stated) <= 0.99


def test_old_records_fade():
    acceptance = Acceptance(decay_observations=50.0)
    for right, steps in ((True, 500), (False, 500)):
        for _ in range(steps):
            acceptance.record("a", 0.5, right)
    assert acceptance.calibrated_probability("a", 0.5) < 0.15


def step(tree: Tree, inputs: int, decided: list[int]) -> Step:
    forward = ForwardInputs(continuation(PROMPT, 20), tree.tokens[:inputs], tree.parents[:inputs])
    nodes = forward.matching_nodes(decided)
    outputs = toy_network(vocab=10).forward([forward], [toy_network().new_kv_cache()])[0]
    distributions = TargetDistributions(forward, outputs, Sampling(), Noise(0))
    return Step(forward.canvas, forward, outputs, distributions, np.array(decided), nodes[-1] if nodes else -1)


def test_nodes_that_were_not_asked_for_are_learned_from_too():
    """What a draft said can be compared with the text whether or not the target was asked: nothing starves."""
    tree = grow_tree([Branch([4, 5, 6], [0.6, 0.6, 0.6], "a")], 9, 9)
    for inputs in (0, 1, 3):
        controller = Controller()
        controller.record(tree, step(tree, inputs, [4, 5]))
        (right, stated), *rest = controller.acceptance.counts.values()
        assert (right, stated) == pytest.approx((2.0, 1.2), rel=0.01)
        assert not rest


def test_a_node_counts_only_if_the_ones_before_it_were_right():
    tree = grow_tree([Branch([4, 5], [0.6, 0.6], "a"), Branch([7, 5], [0.4, 0.4], "b")], 9, 9)
    controller = Controller()
    controller.record(tree, step(tree, 4, [4, 1]))
    counts = {source: count for (source, _), count in controller.acceptance.counts.items()}
    assert counts["a"] == pytest.approx((1.0, 1.2), rel=0.01)
    assert counts["b"] == pytest.approx((0.0, 0.4), rel=0.01)


def test_a_drafter_that_brings_less_than_it_said_is_asked_less_until_its_record_fades():
    acceptance = Acceptance()
    for _ in range(200):
        acceptance.record_payoff("slow/chain", 0, 0.2)
        acceptance.record_payoff("quick/chain", 2, 0.2)
    assert acceptance.calibrated_payoff("slow/chain", 0.06) < 0.02
    assert acceptance.calibrated_payoff("quick/other", 0.06) > 0.3, "one drafter, one record"
    for _ in range(3000):
        acceptance.record_payoff("slow/chain", 0, 0.0)
    assert acceptance.calibrated_payoff("slow/chain", 0.06) > 0.055


def test_all_tokens_of_a_drafter_count_for_the_nodes_that_it_was_given():
    """A chain that is never right itself has paid if it has led to branches that are."""
    chain = Branch([4, 5, 6], [0.01] * 3, "a/chain", payoffs=[0.2, 0.1, 0.05])
    tree = grow_tree([chain, Branch([7, 8], [0.9, 0.9], "a/pool"), Branch([4], [0.5], "b")], 9, 9)
    controller = Controller()
    controller.record(tree, step(tree, len(tree.tokens), [7, 8, 1]))
    controller.record(tree, step(tree, 2, [4, 1]))
    tokens, worths = controller.acceptance.payoff_counts.pop("a")
    assert tokens == pytest.approx(2, rel=0.01)
    assert worths == pytest.approx(0.35, rel=0.01), "nothing of the second call, which asked for the pool alone"
    assert not controller.acceptance.payoff_counts


# ------------------------------------------------------------------------------------------------------ the whole loop


@dataclass
class Clock:
    """A toy whose calls take simulated time by the rows of its tree."""

    toy: ToyNetwork
    costs: CallCost
    spent: float = 0.0

    def new_kv_cache(self):
        return self.toy.new_kv_cache()

    def forward(self, batch, kv_caches) -> list[ForwardOutputs]:
        seconds = self.costs.seconds_for(sum(len(inputs.tokens) + 1 for inputs in batch))
        self.spent += seconds
        return [
            ForwardOutputs(
                one.logits,
                one.hidden_states,
                seconds,
                one.context_tokens_read,
                len(inputs.tokens) + 1,
            )
            for inputs, one in zip(batch, self.toy.forward(batch, kv_caches), strict=True)
        ]


def time_of(method: str, costs: CallCost, length: int = 300, seed: int = 0, error: float = 0.5, **settings) -> float:
    """Simulated seconds of a text, the drafter's own calls included at a third of the target's."""
    target = toy_network(logit_scale=1.2)
    made = toy_decoding(method, PROMPT, length, target=target, seed=seed, sampling=SAMPLED, error=error, **settings)
    clocks = {"target": Clock(target, costs)}
    for name, network in made.networks.items():
        if name != "target":
            clocks[name] = Clock(network, CallCost({rows: value / 3 for rows, value in costs.seconds.items()}))
    for _ in run_batch([made.sequence], clocks):
        pass
    return sum(clock.spent for clock in clocks.values())


STEEP = CallCost({1: 1.0, 16: 8.0})
FLAT = CallCost({1: 1.0, 16: 1.05})


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lookup", "jacobi", "jacobi+lookup", "small_model"])
def test_where_nodes_are_dear_no_method_is_much_slower_than_plain(method: str):
    """Within 5 %, a drafter that is almost never right included."""
    controller = Controller(call_cost=CallCost(dict(STEEP.seconds)))
    assert time_of(method, STEEP, error=30.0, controller=controller) < 1.05 * time_of("plain", STEEP)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lookup", "jacobi", "jacobi+lookup"])
def test_where_nodes_are_cheap_a_method_is_as_fast_as_with_all_its_nodes(method: str):
    controller = Controller(call_cost=CallCost(dict(FLAT.seconds)))
    full = time_of(method, FLAT, controller=Controller(adaptive=False))
    assert time_of(method, FLAT, controller=controller) < 1.05 * full < time_of("plain", FLAT)


def test_a_drafter_that_does_not_earn_its_time_rests_ever_longer_and_others_draft_on():
    controller = Controller(call_cost=CallCost({1: 1.0, 16: 1.1}))
    target, inputs = toy_network(logit_scale=1.2), []
    made = toy_decoding(
        "small_model+lookup", PROMPT, 600, target=target, sampling=SAMPLED, error=30.0, controller=controller
    )
    clocks = {
        "target": Clock(target, controller.call_cost),
        "small_model": Clock(made.networks["small_model"], CallCost({1: 0.3, 16: 0.3})),
    }
    for _ in run_batch([made.sequence], clocks):
        inputs.append(clocks["small_model"].toy.calls)
    assert inputs[-1] < 100
    half = inputs[len(inputs) // 2]
    assert inputs[-1] - half < 0.25 * half
    assert len(made.steps) < 500, "lookup went on"


def test_while_a_draft_network_rests_for_long_calls_return_no_hidden_states():
    controller = Controller(call_cost=CallCost({1: 1.0, 16: 1.1}))
    target, asked, given = toy_network(logit_scale=1.2), [], []
    made = toy_decoding("ptp", PROMPT, 700, target=target, sampling=SAMPLED, error=30.0, controller=controller)

    class Target(Clock):
        def forward(self, batch, kv_caches) -> list[ForwardOutputs]:
            asked.extend(inputs.output_hidden_states for inputs in batch)
            return super().forward(batch, kv_caches)

    class DraftModel(Clock):
        def forward(self, batch, kv_caches) -> list[ForwardOutputs]:
            given.extend((len(asked), len(inputs.hidden_states)) for inputs in batch)
            return super().forward(batch, kv_caches)

    draft_model = DraftModel(made.networks["ptp"], CallCost({1: 1.0, 16: 1.0}))
    for _ in run_batch([made.sequence], {"target": Target(target, controller.call_cost), "ptp": draft_model}):
        pass
    after_rests = [states for (before, _), (now, states) in pairwise(given) if now - before > 100]
    assert after_rests
    assert min(after_rests) >= MAX_UNREAD, "all that it reads after a rest"
    assert asked.count(False) > 100
    assert all(asked[: given[1][0]]), "at first it may draft in every step"


@pytest.mark.parametrize(("odds", "time", "least"), [
    ([0.58, 0.25, 0.12, 0.05], 1.5, 1.07),  # 1.64 tokens in the time of 1.5: gains 9 %
    ([0.83, 0.14, 0.03], 1.4, 0.98),  # loses 14 %
    ([1.0], 3.0, 0.97),
])  # fmt: skip
def test_shifts_find_out_whether_drafting_pays_though_each_step_says_little(odds, time, least):
    tokens = spent = 0.0
    for seed in range(10):
        shifts, chance = DraftingSwitch(), seeded_generator(seed, "acceptance")
        for _ in range(1000):
            works = shifts.should_draft()
            decided = 1 + int(chance.choice(len(odds), p=odds)) if works else 1
            (shifts.with_drafts if works else shifts.without_drafts).record(float(decided), time if works else 1.0)
            tokens, spent = tokens + decided, spent + (time if works else 1.0)
    assert tokens / spent > least


def test_a_trial_is_not_lost_before_its_first_step():
    """A drafter has hidden states only after the first call, which other drafters may have made long."""
    switch = DraftingSwitch()
    for _ in range(3):
        assert switch.should_draft()
        switch.without_drafts.record(3.0, 1.1)
    for _ in range(5):
        assert switch.should_draft()
        switch.with_drafts.record(2.0, 1.2)
    switch = DraftingSwitch()
    drafting = 0
    for _ in range(30):
        drafting += switch.should_draft()
        (switch.with_drafts if switch.drafting else switch.without_drafts).record(1.0, 3.0 if switch.drafting else 1.0)
    assert drafting <= 3, "one that takes so long is"


@pytest.mark.parametrize("batch_size", [1, 16])
def test_a_batch_tries_no_more_of_its_calls_with_drafts_than_a_text_alone(batch_size):
    switch, calls = DraftingSwitch(batch_size=batch_size), []
    for _ in range(2000):
        drafting = False
        for _ in range(batch_size):
            drafting |= switch.should_draft()
            (switch.with_drafts if switch.drafting else switch.without_drafts).record(1.0, 1.0 + switch.drafting)
        calls.append(drafting)
    assert sum(calls[1000:]) <= 16


@pytest.mark.parametrize("length", [20, 300])
def test_reading_a_prompt_is_not_held_against_a_drafter(length):
    controller = Controller(call_cost=CallCost({1: 1.0, 16: 1.1}))
    target = toy_network(logit_scale=1.2)
    options = {"small_model": {"min_probability": 0.0}}
    made = toy_decoding(
        "small_model", (PROMPT * length)[:length], 30, target=target, error=0.0, controller=controller, options=options
    )

    class Prefill(Clock):
        def forward(self, batch, kv_caches) -> list[ForwardOutputs]:
            batch_outputs = super().forward(batch, kv_caches)
            return [
                ForwardOutputs(
                    one.logits,
                    seconds=60.0 if one.context_tokens_read > 12 else 0.05,
                    context_tokens_read=one.context_tokens_read,
                )
                for one in batch_outputs
            ]

    clocks = {
        "target": Clock(target, controller.call_cost),
        "small_model": Prefill(made.networks["small_model"], CallCost({1: 0.05})),
    }
    for _ in run_batch([made.sequence], clocks):
        pass
    assert controller.drafting_switch.drafting
    assert controller.drafting_switch.with_drafts.rate > 1.2, "of eight plain steps and a few"
    assert len(made.steps) <= 7


class Reader(Clock):
    """The clock of a draft model: seconds for each token of a prompt, and for each other call."""

    token_seconds: float = 0.0

    def forward(self, batch, kv_caches) -> list[ForwardOutputs]:
        return [
            replace(one, seconds=max(self.token_seconds * one.context_tokens_read, 0.1))
            for one in super().forward(batch, kv_caches)
        ]


@pytest.mark.parametrize(
    ("method", "token_seconds"), [("small_model", 0.01), ("small_model", 1.0), ("small_model+lookup", 1.0)]
)
def test_a_draft_model_reads_a_prompt_where_its_drafts_save_more(method, token_seconds):
    """One that is right saves some 20 of 30 calls; reading 40 tokens takes the time of 0.4 or of 40."""
    controller = Controller(call_cost=CallCost({1: 1.0, 16: 1.1}))
    target, reading = toy_network(logit_scale=1.2), []
    for _ in range(6):
        options = {"small_model": {"min_probability": 0.0}}
        made = toy_decoding(
            method, PROMPT * 14, 30, target=target, error=0.0, controller=controller, options=options
        )  # fmt: skip
        clock = Reader(made.networks["small_model"], CallCost({1: 0.1}))
        clock.token_seconds = token_seconds
        for _ in run_batch([made.sequence], {"target": Clock(target, controller.call_cost), "small_model": clock}):
            pass
        reading.append(made.networks["small_model"].calls > 0)
    assert reading == [True, *[token_seconds == 0.01] * 5], "at first nothing is known"


def test_before_a_draft_model_was_called_its_size_tells_what_its_calls_take():
    controller = Controller(call_cost=CallCost({1: 1.0, 32: 8.0}))
    record, sure = controller.draft_model, grow_tree([Branch([3], [0.99], "a")], 9, 9)
    record.relative_size = 0.5
    saved = controller.draft_model_saves(EMPTY_TREE, 0.0)
    assert saved == pytest.approx(1.5 - 0.5)
    record.record_step(0, saved)
    assert controller.reading_pays(8, 1000, True), "the time of one call"
    assert not controller.reading_pays(8, 1000, False), "nothing is known of what others draft"
    for _ in range(20):
        record.record_step(1, saved)
    assert controller.reading_pays(100, 1000, False), "the time of 12 calls, and each step may save the time of one"
    assert not controller.reading_pays(100, 10, False)
    saved = controller.draft_model_saves(sure, 0.0)
    assert saved < 0, "what drafts without calls is nearly always right"
    for _ in range(100):
        record.record_step(2, saved)
    assert not controller.reading_pays(100, 1000, False)


def test_what_calls_of_a_draft_model_bring_is_learned():
    controller = Controller(call_cost=CallCost({1: 1.0, 32: 1.0}))
    for _ in range(200):  # its tokens are known already
        known = [Branch([3], [0.5], "a")]
        both = controller.offered_tree([*known, Branch([3], [0.5], "b")], 9)
        controller.record_draft_calls(controller.offered_tree(known, 9), both, 0.2)
    assert controller.draft_model_saves(EMPTY_TREE, 0.0) < 0
    for _ in range(200):
        controller.record_draft_calls(EMPTY_TREE, grow_tree([Branch([3, 4, 5], [0.9, 0.9, 0.9], "b")], 9, 9), 0.2)
    assert controller.draft_model_saves(EMPTY_TREE, 0.0) == pytest.approx(2.4 - 0.2, abs=0.2)


def test_half_of_what_a_step_counts_is_what_it_was_expected_to_decide():
    """Else trials of few steps would be decided by luck."""
    controller = Controller(call_cost=CallCost({1: 1.0, 8: 1.0}))
    for _ in range(40):  # half of the drafts are right, as stated
        for decided in ([3, 4], [5]):
            tree = controller.offered_tree([Branch([3], [0.5], "a")], 4)
            controller.record(tree, step(tree, 1, decided), draft_seconds=0.2, drafters_on=True)
    rates = []
    for decided in ([3, 4], [5]):
        switch = controller.drafting_switch.with_drafts
        switch.tokens = switch.time = 0.0
        for _ in range(8):
            tree = controller.offered_tree([Branch([3], [0.5], "a")], 4)
            controller.record(tree, step(tree, 1, decided), draft_seconds=0.2, drafters_on=True)
        rates.append(switch.rate)
    by_luck = 16 / (8 + 8 * 1.2), 24 / (8 + 8 * 1.2)
    assert 0.3 < (rates[0] - rates[1]) / (by_luck[1] - by_luck[0]) < 0.6
    assert sum(rates) / 2 == pytest.approx(sum(by_luck) / 2, rel=0.05)


def test_without_draft_tokens_no_drafter_is_called():
    def offended(canvas, last, max_depth):
        raise AssertionError("asked")

    steps: list[Step] = []
    generator = speculate(
        continuation(PROMPT, 5), Noise(0), SAMPLED, [offended], steps.append, controller=Controller(0)
    )
    run(generator, {"target": toy_network()})
    assert len(steps) == 5


def test_seats_share_a_controller():
    controller = Controller(call_cost=CallCost({1: 1.0, 16: 1.05}))
    target = toy_network()
    made = [toy_decoding("lookup", PROMPT, 40, target=target, seed=i, controller=controller) for i in range(3)]
    sequences: list[SequenceState] = [one.sequence for one in made]
    for _ in run_batch(sequences, {"target": target}):
        pass
    assert all(len(one.tokens) == 40 for one in made)
    assert controller.acceptance.counts


def test_in_a_batch_all_texts_wait_for_what_one_computes_outside_of_calls():
    """Work of a tenth of a call is worth two tokens for one text, and not where sixteen texts wait for each other."""
    rates = []
    for batch_size in (1, 16):
        controller = Controller(call_cost=CallCost({1: 1.0, 8: 1.0}), batch_size=batch_size)
        tree = controller.offered_tree([Branch([3], [0.9], "a")], 4)
        controller.record(tree, step(tree, 1, [3, 4]), draft_seconds=0.1, other_seconds=0.1, drafters_on=True)
        rates.append(controller.drafting_switch.with_drafts.rate)
    assert rates[0] > 1 > rates[1]


@pytest.mark.parametrize(("batch_size", "num_texts"), [(1, 1), (4, 4), (4, 3)])
def test_costs_by_rows_of_each_text_follow_the_calls_of_a_batch(batch_size: int, num_texts: int):
    tree = grow_tree([Branch([4, 5], [0.6, 0.6], "a")], 9, 9)
    controller = Controller(9, call_cost=CallCost({1: 1.0, 8: 1.0}), batch_size=batch_size)
    controller.num_texts = num_texts

    def record(num_rows: int, seconds: float) -> None:
        made = step(tree, 2, [4, 1])
        outputs = replace(made.outputs, context_tokens_read=1, num_rows=num_rows, seconds=seconds)
        controller.record(tree, replace(made, outputs=outputs))

    for _ in range(num_texts):
        record(num_rows=1000, seconds=9.0)
    assert controller.call_cost.seconds == {1: 1.0, 8: 1.0}, "a prompt of another text was read, too"
    for _ in range(40 * num_texts):
        record(num_rows=3 * num_texts, seconds=1.9)
    assert controller.call_cost.seconds_for(3) == pytest.approx(1.9, rel=0.05)
    assert controller.call_cost.calls_alike == 40, "each call is recorded once"


@dataclass
class QueryingDrafter:
    """Drafts two right tokens after each call that had a query."""

    calls: int = 0

    def __call__(self, canvas, last, max_depth):
        right = last is not None and last.inputs.query_nodes
        return [Branch([0, 0][:max_depth], [0.9, 0.9][:max_depth], "querying")] if right else ()

    def add_draft_queries(self, inputs, probabilities, controller):
        self.calls += 1
        return with_query_chains(inputs, [(-1, [0.5])], 0.0)


@dataclass(frozen=True)
class NetworkOfCosts:
    """A network that always predicts token 0; its calls take a second, and with queries more."""

    query_seconds: float

    def new_kv_cache(self):
        return None

    def forward(self, batch, kv_caches):
        (inputs,) = batch
        rows = 1 + len(inputs.tokens)
        seconds = 1.0 + self.query_seconds * len(inputs.query_nodes)
        return [ForwardOutputs(torch.zeros(rows, 5), None, seconds, 1, rows)]


@pytest.mark.parametrize(("query_seconds", "pays"), [(5.0, False), (0.1, True)])
def test_queries_are_added_while_they_pay(query_seconds, pays):
    drafter = QueryingDrafter()
    steps: list[Step] = []
    cost = CallCost({1: 1.0, 2: 1.0 + query_seconds, 4: 1.0 + query_seconds})
    generator = speculate(
        continuation(PROMPT, 400), Noise(0), Sampling(), [drafter], steps.append, controller=Controller(call_cost=cost)
    )
    run(generator, {"target": NetworkOfCosts(query_seconds)})
    assert (drafter.calls > 0.6 * len(steps)) == pays, (drafter.calls, len(steps))
    assert pays or drafter.calls < 0.25 * len(steps)
