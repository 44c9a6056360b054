"""Simulate the control of drafts: how much time it loses against one that knows what calls cost.

    python benchmarks/draft_control.py --calls 1200

Calls take simulated time by the number of their draft tokens, on a machine on which other work comes and goes. In each
case the controller starts with a calibration, right or wrong, and what calls cost may change. The loss is its time a
token, beside that of the better of two rules that know the costs: each text drafts what pays for it, or nobody looks
for drafts. True acceptance probabilities are given. Run it at two commits to compare them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np

from saltus.core.control.call_cost import CallCost
from saltus.core.control.controller import Controller
from saltus.core.tree import Branch, Tree, grow_tree

SIZES = (1, 2, 4, 8, 16, 32)  # rows of a text that a calibration knows
LOOKING = 0.006  # of a plain call: the host looks for the drafts of one text
FOUND = 0.5  # of a text's steps have drafts
BATCHES, DRAFT_COSTS, ACCEPTANCES = (1, 4, 16), (0.1, 0.4, 0.67, 0.8), (0.3, 0.6, 0.9)

Cost = Callable[[float, float], float]
"""Time of a call by the rows of each text, and by how much of the run is over."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1200)
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=SCENARIOS, metavar="NAME")
    asked = parser.parse_args()
    losses: dict[str, list[float]] = {}
    print("| scenario | mean loss | greatest loss |\n|---|---|---|")
    for name in asked.scenarios:
        for case in itertools.product(BATCHES, DRAFT_COSTS, ACCEPTANCES):
            losses.setdefault(name, []).append(loss(name, *case, asked.calls))
        print(f"| {name} | {np.mean(losses[name]):.2%} | {max(losses[name]):.1%} |", flush=True)
    every = [each for of_scenario in losses.values() for each in of_scenario]
    print(f"| all | {np.mean(every):.2%} | {max(every):.1%} |")


def linear(draft_cost: float) -> Cost:
    """Each draft token of all texts costs the same."""
    return lambda rows, when: 1 + draft_cost * (rows - 1)


def longer_texts(draft_cost: float) -> Cost:
    """Keys and values are read for all rows of a text together, more and more of them."""
    return lambda rows, when: 1 + when + draft_cost * (rows - 1)


def other_process(draft_cost: float) -> Cost:
    """For a third of the time another process slows reading, and arithmetic a little."""
    return lambda rows, when: (
        2 + 1.2 * draft_cost * (rows - 1) if 1 / 3 < when < 2 / 3 else linear(draft_cost)(rows, when)
    )


def cheaper_drafts(draft_cost: float) -> Cost:
    """From the middle on draft tokens cost a third of what they did."""
    return lambda rows, when: 1 + draft_cost * (2 if when < 0.5 else 0.7) * (rows - 1)


def free_rows(draft_cost: float) -> Cost:
    """The first two draft tokens cost next to nothing."""
    return lambda rows, when: 1 + 0.02 * (rows - 1) + draft_cost * max(rows - 3, 0)


def right(seconds: dict[int, float]) -> dict[int, float]:
    return seconds


def drafts_times(factor: float) -> Callable[[dict[int, float]], dict[int, float]]:
    """A calibration in which draft tokens take `factor` times what they do."""
    return lambda seconds: {rows: 1 + factor * (known - 1) for rows, known in seconds.items()}


def all_times_three(seconds: dict[int, float]) -> dict[int, float]:
    return {rows: 3 * known for rows, known in seconds.items()}


def slow_small_call(seconds: dict[int, float]) -> dict[int, float]:
    """The plain call was disturbed, and so larger ones seem to take as long at least."""
    return {rows: max(known, 1.6) for rows, known in seconds.items()}


SCENARIOS = {
    "right calibration": (linear, right),
    "longer texts": (longer_texts, right),
    "another process": (other_process, right),
    "cheaper drafts": (cheaper_drafts, right),
    "drafts seem dear": (linear, drafts_times(3)),
    "drafts seem cheap": (linear, drafts_times(1 / 3)),
    "all seems slow": (linear, all_times_three),
    "plain calls seem slow": (linear, slow_small_call),
    "free rows": (free_rows, right),
    "free rows seem dear": (free_rows, drafts_times(3)),
}


def loads(seed: str) -> Iterator[float]:
    """By what calls take longer: bursts of a hundred calls or so, and now and then one for up to two calls' time."""
    dice = random.Random(seed)
    while True:
        for load, mean in ((1.0, 300), (1 + min(dice.paretovariate(2.0) - 0.8, 2.5), 100)):
            for _ in range(int(dice.expovariate(1 / mean))):
                yield load * (1 + 0.03 * min(dice.paretovariate(1.5), 40) + abs(dice.gauss(0, 0.03)))


@cache
def chain(odds: float, length: int) -> Tree:
    return grow_tree([Branch(list(range(length)), [odds] * length, "simulated")], length, length)


def found_drafts(acceptance: float, dice: random.Random) -> Tree:
    """What is found in a step of one text: nothing, or a chain that is better or worse than others."""
    if dice.random() > FOUND:
        return chain(0.5, 0)
    log_odds = math.log(acceptance / (1 - acceptance)) + dice.gauss(0, 0.8)
    return chain(round(1 / (1 + math.exp(-log_odds)), 2), dice.choice((2, 4, 8)))


def loss(scenario: str, batch_size: int, draft_cost: float, acceptance: float, calls: int) -> float:
    """Time that is lost in a case, of the least time."""
    kind, disturbed = SCENARIOS[scenario]
    cost = kind(draft_cost)
    calibration = disturbed({rows: cost(rows, 0.0) for rows in SIZES})
    controller = Controller(call_cost=CallCost(calibration), batch_size=batch_size)

    def time_of_token(looks: Callable[[], bool], size: Callable[[Tree, float], int]) -> float:
        seed = f"{scenario} {batch_size} {draft_cost} {acceptance}"
        dice, load, tokens, spent = random.Random(seed), loads(seed), 0.0, 0.0
        for number in range(calls):
            when, looking, nodes = number / calls, looks(), 0
            for tree in [found_drafts(acceptance, dice) for _ in range(batch_size)]:
                kept = size(tree, when) if looking else 0
                nodes, tokens = nodes + kept, tokens + 1 + sum(tree.expected_tokens[:kept])
            rows, slower = 1 + nodes / batch_size, next(load)
            if size is chosen:
                controller.call_cost.record(rows, slower * cost(rows, when))
            spent += slower * (cost(rows, when) + LOOKING * batch_size * looking)
        return spent / tokens

    def chosen(tree: Tree, when: float) -> int:
        return controller.num_nodes(tree)

    def best(tree: Tree, when: float) -> int:
        expected = [1.0, *itertools.accumulate(tree.expected_tokens, initial=1.0)][1:]
        return max(range(len(expected)), key=lambda nodes: expected[nodes] / cost(nodes + 1, when))

    least = min(time_of_token(lambda: True, best), time_of_token(lambda: False, best))
    return time_of_token(controller.can_pay, chosen) / least - 1


if __name__ == "__main__":
    main()
