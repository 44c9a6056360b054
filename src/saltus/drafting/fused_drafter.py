"""Draft in the call that verifies: groups of queries ride wherever the accepted path may end (PTP, Alg. 1)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from saltus.core.canvas import Canvas
from saltus.core.control.controller import Controller
from saltus.core.distributions import Step
from saltus.core.forward import ForwardInputs
from saltus.core.noise import Noise
from saltus.core.sampling import Sampling
from saltus.core.tree import Branch
from saltus.drafting.ptp_queries import (
    SOURCE,
    UniformConditioning,
    drafts_of_chain,
    position_uniforms,
    query_uniforms,
    with_query_chains,
)

DEPTH_PRIOR = 0.5  # what a draft's chance is stated as, where the record of its depth is kept
RETRY_CALLS = 32  # calls after which a group is asked for again that did not pay


@dataclass
class FusedPtpDrafter:
    """Draft in the call that verifies: wherever the accepted path may end, a group of queries stands ready.

    After a call the text's last token is the verifier's own pick behind the last accepted node, which is in no tree.
    So the first query of that node's group spoke for this token, by its uniform, and the others are the next drafts:
    a group of k queries brings k − 1. A drafter of one text, for the rule `match`.
    """

    noise: Noise
    sampling: Sampling
    form: UniformConditioning = "one-hot"
    length: int = 8  # drafts of a group, at most
    max_queries: int = 32  # queries of a call, at most
    last_drafts: list[int] = field(default_factory=list, init=False)  # drafts of the last step
    last_correct: list[bool] = field(default_factory=list, init=False)  # were those right, as far as is known?
    calls_without_queries: int = field(default=0, init=False)  # calls without queries

    def __call__(self, canvas: Canvas, last: Step | None, room: int) -> Sequence[Branch]:
        """The drafts of the group behind the node where the last step ended."""
        tokens: list[int] = []
        probabilities: list[float] = []
        if last is not None:
            chain = last.inputs.query_chain(last.last_node)[1:]
            uniforms = position_uniforms(self.noise, self.sampling, canvas.open_positions[: len(chain)])
            for token, chance in drafts_of_chain(last.distributions, chain, self.form, uniforms):
                tokens.append(token)
                probabilities.append(chance)
        before, self.last_drafts = self.last_drafts, tokens
        self.last_correct = [] if last is None else correct_prefix(before, last.tokens.tolist())
        return [Branch(tokens[:room], probabilities[:room], SOURCE)] if tokens and room else []

    def add_draft_queries(
        self, inputs: ForwardInputs, probabilities: Sequence[float], controller: Controller
    ) -> ForwardInputs:
        """Hang groups into the tree that is about to be verified; `chances` are those of its nodes, if the parent is.

        Sizes follow from where the accepted path may end, from how often drafts of each depth were right, and from
        what rows cost.
        """
        if not controller.budget:
            return inputs
        for depth, right in enumerate(self.last_correct):
            if controller.adaptive:
                controller.acceptance.record(f"{SOURCE}/{depth}", DEPTH_PRIOR, right)
        odds = [controller.calibrated_probability(f"{SOURCE}/{depth}", DEPTH_PRIOR) for depth in range(self.length)]
        ends, reached = path_end_probabilities(inputs, probabilities)
        left = len(inputs.canvas.open_positions) - 1
        room = [left, *(left - depth - 1 for depth in inputs.depths)]
        rows, expected = len(inputs.tokens) + 1, sum(reached)  # the decided text's end is reached for sure
        costs = controller.call_cost.seconds_for if controller.adaptive else lambda rows: 1.0
        sizes = query_chain_lengths(ends, odds, self.max_queries, room, rows, expected, costs)
        self.calls_without_queries = 0 if any(sizes) else self.calls_without_queries + 1
        if self.calls_without_queries >= RETRY_CALLS and left > 1:
            sizes[0], self.calls_without_queries = 2, 0
        groups = []
        for node, size in enumerate(sizes, start=-1):
            if size:
                first = inputs.depths[node] + 1 if node >= 0 else 0
                uniforms = position_uniforms(
                    self.noise, self.sampling, inputs.canvas.open_positions[first : first + size]
                )
                groups.append((node, query_uniforms(uniforms, self.form)))
        return with_query_chains(inputs, groups, self.sampling.temperature) if groups else inputs


def correct_prefix(drafts: Sequence[int], decided: Sequence[int]) -> list[bool]:
    """Which drafts were right, up to the first wrong one or the last decided token."""
    found = []
    for draft, token in zip(drafts, decided, strict=False):
        found.append(draft == token)
        if draft != token:
            break
    return found


def path_end_probabilities(inputs: ForwardInputs, probabilities: Sequence[float]) -> tuple[list[float], list[float]]:
    """For the decided text and then each node: the chance that the accepted path ends there, and that it gets there."""
    reached = [1.0]
    for parent, chance in zip(inputs.parents, probabilities, strict=True):
        reached.append(reached[parent + 1] * chance)
    ends = list(reached)
    for parent, chance in zip(inputs.parents, reached[1:], strict=True):
        ends[parent + 1] = max(ends[parent + 1] - chance, 0.0)
    return ends, reached


def query_chain_lengths(
    end_probabilities: Sequence[float],
    depth_probabilities: Sequence[float],
    max_queries: int,
    room: Sequence[int],
    rows: int,
    expected: float,
    costs: Callable[[int], float],
) -> list[int]:
    """How many queries to hang behind the decided text and behind each node, `most` in all: where they pay most.

    `ends[i]`: chance that the accepted path ends there, `odds[j]`: that draft j is right if those before it are,
    `room[i]`: holes behind the token that the first query speaks for. A group of k queries brings
    ends · Σ_j Π odds[:j + 1] over its k − 1 drafts; steps are taken along the upper hull of that, the steepest
    first, as long as tokens per second rise: `rows` and `expected` tokens are those of the call without queries.
    """
    steps = concave_steps(depth_probabilities)
    sizes, heap = (
        [0] * len(end_probabilities),
        [(-end * steps[0][1] / steps[0][0], i, 0) for i, end in enumerate(end_probabilities)],
    )
    heapq.heapify(heap)
    left = max_queries
    while heap:
        slope, place, step = heapq.heappop(heap)
        width = min(steps[step][0], room[place] + 1 - sizes[place], left)
        if width < 1 or sizes[place] + width < 2:
            continue
        value = -slope * width
        if value <= 0 or (expected + value) * costs(rows) <= expected * costs(rows + width):
            break
        sizes[place] += width
        left, rows, expected = left - width, rows + width, expected + value
        if step + 1 < len(steps) and width == steps[step][0]:
            heapq.heappush(heap, (-end_probabilities[place] * steps[step + 1][1] / steps[step + 1][0], place, step + 1))
    return sizes


def concave_steps(depth_probabilities: Sequence[float]) -> list[tuple[int, float]]:
    """Steps (queries, drafts that they bring) of falling slope by which a group grows; its first query brings none."""
    steps: list[tuple[int, float]] = [(1, 0.0)]
    for value in np.cumprod(np.asarray(depth_probabilities, dtype=np.float64)).tolist():
        step = (1, value)
        while steps and step[1] * steps[-1][0] >= steps[-1][1] * step[0]:
            before = steps.pop()
            step = (before[0] + step[0], before[1] + step[1])
        steps.append(step)
    return steps
