"""Draft inside the verification call: chains of queries after every node where the accepted path may end (PTP)."""

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
from saltus.methods.shared.query_chains import (
    SOURCE,
    UniformConditioning,
    drafts_of_chain,
    position_uniforms,
    query_uniforms,
    with_query_chains,
)

DEPTH_PRIOR = 0.5  # the probability under which the acceptance of each depth is recorded
RETRY_CALLS = 32  # calls without queries after which a chain is tried again


@dataclass
class FusedPtpDrafter:
    """Drafts of one text from query chains in the previous verification call, for the rule `match` (PTP, Alg. 1).

    A call decides one token more than it accepts: the verifier's pick after the last accepted node. The first query
    after that node predicts this token, and the other queries predict the next draft tokens. So a chain of k queries
    gives k − 1 drafts.
    """

    noise: Noise
    sampling: Sampling
    form: UniformConditioning = "one-hot"
    num_draft_tokens: int = 8  # drafts of a chain, at most
    argmax: bool = False  # queries draft their likeliest token, as those of the form "one-hot" always do
    max_queries: int = 32  # queries of a call, at most
    last_drafts: list[int] = field(default_factory=list, init=False)  # drafts of the last step
    # for each of them up to the first wrong one: True if it was right
    last_correct: list[bool] = field(default_factory=list, init=False)
    calls_without_queries: int = field(default=0, init=False)  # since the last chain

    def __call__(self, canvas: Canvas, last: Step | None, max_depth: int) -> Sequence[Branch]:
        """The drafts of the query chain after the node where the last step ended."""
        tokens: list[int] = []
        probabilities: list[float] = []
        if last is not None:
            chain = last.inputs.query_chain(last.last_node)[1:][: len(canvas.open_positions)]
            for token, chance in drafts_of_chain(last.distributions, chain, self.argmax or self.form == "one-hot"):
                tokens.append(token)
                probabilities.append(chance)
        before, self.last_drafts = self.last_drafts, tokens
        self.last_correct = [] if last is None else correct_prefix(before, last.tokens.tolist())
        return [Branch(tokens[:max_depth], probabilities[:max_depth], SOURCE)] if tokens and max_depth else []

    def add_draft_queries(
        self, inputs: ForwardInputs, probabilities: Sequence[float], controller: Controller
    ) -> ForwardInputs:
        """Add query chains to the tree; `probabilities[i]` is that of node i given that its parent is accepted.

        Lengths follow from where the accepted path may end, from acceptance by depth, and from the cost of rows.
        """
        if not controller.max_draft_tokens:
            return inputs
        for depth, right in enumerate(self.last_correct):
            if controller.adaptive:
                controller.acceptance.record(f"{SOURCE}/{depth}", DEPTH_PRIOR, right)
        depths = range(self.num_draft_tokens)
        odds = [controller.calibrated_probability(f"{SOURCE}/{depth}", DEPTH_PRIOR) for depth in depths]
        ends, reached = path_end_probabilities(inputs, probabilities)
        left = len(inputs.canvas.open_positions) - 1
        holes_after = [left, *(left - depth - 1 for depth in inputs.depths)]
        rows, expected = len(inputs.tokens) + 1, sum(reached)  # including the token that every call decides
        costs = controller.call_cost.seconds_for if controller.adaptive else lambda rows: 1.0
        sizes = query_chain_lengths(ends, odds, self.max_queries, holes_after, rows, expected, costs)
        self.calls_without_queries = 0 if any(sizes) else self.calls_without_queries + 1
        if self.calls_without_queries >= RETRY_CALLS and left > 1:
            sizes[0], self.calls_without_queries = 2, 0
        chains = []
        for node, size in enumerate(sizes, start=-1):
            if size:
                first = inputs.depths[node] + 1 if node >= 0 else 0
                uniforms = position_uniforms(
                    self.noise, self.sampling, inputs.canvas.open_positions[first : first + size]
                )
                chains.append((node, query_uniforms(uniforms, self.form)))
        return with_query_chains(inputs, chains, self.sampling.temperature) if chains else inputs


def correct_prefix(drafts: Sequence[int], decided: Sequence[int]) -> list[bool]:
    """Which drafts were right, up to the first wrong one or the last decided token."""
    correct = []
    for draft, token in zip(drafts, decided, strict=False):
        correct.append(draft == token)
        if draft != token:
            break
    return correct


def path_end_probabilities(inputs: ForwardInputs, probabilities: Sequence[float]) -> tuple[list[float], list[float]]:
    """For the decided text and each node: the probabilities that the accepted path ends there, and reaches it."""
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
    holes_after: Sequence[int],
    rows: int,
    expected: float,
    costs: Callable[[int], float],
) -> list[int]:
    """The number of queries after the decided text and after each node, at most `max_queries` in all.

    `end_probabilities[i]` is the probability that the accepted path ends there, `depth_probabilities[j]` that draft j
    is right if those before it are, and `holes_after[i]` the holes after the token of the first query. A chain of
    k queries gives end · Σ_j Π depth[:j + 1] expected tokens over its k − 1 drafts. Chains grow along the concave hull
    of that, the steepest step first, while tokens per second rise: `costs` gives seconds for a number of rows, and
    `rows` and `expected` tokens are those of the call without queries.
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
        width = min(steps[step][0], holes_after[place] + 1 - sizes[place], left)
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
    """Steps (queries, expected drafts) of falling slope by which a chain grows; its first query gives no draft."""
    steps: list[tuple[int, float]] = [(1, 0.0)]
    for value in np.cumprod(np.asarray(depth_probabilities, dtype=np.float64)).tolist():
        step = (1, value)
        while steps and step[1] * steps[-1][0] >= steps[-1][1] * step[0]:
            before = steps.pop()
            step = (before[0] + step[0], before[1] + step[1])
        steps.append(step)
    return steps
