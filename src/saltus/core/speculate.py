"""Decode one text: draft, verify in one call, accept, until no hole is left. The one loop of every method."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import numpy as np

from saltus.core.canvas import Canvas
from saltus.core.constraint import Constraint, constrained_branches
from saltus.core.control.controller import Controller
from saltus.core.distributions import DecodeGenerator, Step, TargetDistributions
from saltus.core.draft_calls import DraftModelCalls
from saltus.core.forward import ForwardInputs, ForwardOutputs, GumbelMax
from saltus.core.noise import Noise
from saltus.core.protocols import (
    Drafter,
    DraftGenerator,
    FusedDrafter,
    StopCondition,
    UsesCandidates,
    UsesHiddenStates,
    checked_drafts,
)
from saltus.core.rules import Rule, match
from saltus.core.sampling import Sampling
from saltus.core.tree import Drafts


def speculate(
    canvas: Canvas,
    noise: Noise,
    sampling: Sampling,
    drafters: Sequence[Drafter],
    on_step: Callable[[Step], None],
    rule: Rule = match,
    controller: Controller | None = None,
    stop: StopCondition | None = None,
    constraint: Constraint | None = None,
    reads_logits: bool = False,
    vocab: int | None = None,
) -> DecodeGenerator:
    """Decode one text. Under `match` neither drafters nor controller can change it (PTP, Alg. 1 with any draft).

    `on_step` gets each step after its tokens have filled the canvas (`Step.canvas` is the one before); the text is the
    tokens of all steps. `stop` may end it early. A `constraint` restricts a continuation, and where anything is drafted
    so is what it forces. Without a controller up to 16 draft tokens are verified in each call. `on_step` may read
    logits in any case; where it does with every step, `reads_logits` says so. `vocab` is the number of tokens that the
    target can read: beyond it nothing may be drafted.
    """
    controller = controller or Controller(adaptive=False)
    fused = [drafter for drafter in drafters if isinstance(drafter, FusedDrafter)]
    state_readers = [each for each in drafters if isinstance(each, UsesHiddenStates) and each.output_hidden_states]
    drafts_candidates = any(isinstance(drafter, UsesCandidates) for drafter in drafters)
    needed = _needed_outputs(noise, sampling, rule, constraint, reads_logits)
    draft_calls = DraftModelCalls(controller, vocab)
    controller.draft_model.begin_text()
    last: Step | None = None
    while len(canvas.open_positions):
        # The distribution after the last accepted node decides one hole more than the tree is deep.
        max_depth = min(len(canvas.open_positions) - 1, controller.max_draft_tokens)
        step_calls = draft_calls.begin_step(last)
        started = time.perf_counter()
        can_pay = controller.can_pay()
        should_draft = controller.should_draft() and can_pay
        asked = drafters if can_pay else state_readers  # which keep the states of every step
        drafted = yield from _draft(asked, draft_calls, canvas, max_depth, should_draft)
        if constraint is not None and drafters and max_depth:
            drafted = [*constrained_branches(drafted, constraint, canvas.new_tokens.tolist(), max_depth)]
        offered = controller.offered_tree(drafted, max_depth)
        tree = offered.prune(controller.num_nodes(offered))
        inputs = ForwardInputs(
            canvas, tree.tokens, tree.parents,
            any(controller.needs_hidden_states(reader.max_unread) for reader in state_readers),
            draft_distributions=tree.distributions if any(tree.distributions) else None,
            gumbel_max=needed.gumbel_max,
            candidate_temperature=needed.candidate_temperature or float(drafts_candidates and should_draft),
            reads_logits=needed.logits, drafts=drafted,
        )  # fmt: skip
        for drafter in fused if should_draft else ():
            probabilities = list(map(controller.calibrated_probability, tree.sources, tree.acceptance_probabilities))
            inputs = drafter.add_draft_queries(inputs, probabilities, controller)
        other_seconds = time.perf_counter() - started - step_calls.waited
        outputs = yield inputs
        started = time.perf_counter()
        step, is_end = _verify(TargetDistributions(inputs, outputs, sampling, noise, constraint), rule, stop)
        other_seconds += time.perf_counter() - started
        if last is None:  # the first step may time calls, index the prompt, and import what was not needed yet
            other_seconds = 0.0
        draft_seconds = None if step_calls.read_prompt else step_calls.seconds
        drafters_on = step_calls.asked or (should_draft and bool(fused))
        controller.record(offered, step, draft_seconds, other_seconds, drafters_on)
        canvas, last = canvas.fill(step.tokens), step
        on_step(step)
        if is_end:
            break
    controller.draft_model.end_text(canvas.num_decided)


class _NeededOutputs(NamedTuple):
    """What the host needs of the target's calls, so that a GPU need copy no more (see `ForwardInputs`)."""

    gumbel_max: GumbelMax | None
    candidate_temperature: float
    logits: bool


def _needed_outputs(
    noise: Noise, sampling: Sampling, rule: Rule, constraint: Constraint | None, reads_logits: bool
) -> _NeededOutputs:
    if constraint is not None:
        return _NeededOutputs(None, 0.0, True)
    gumbel_max = GumbelMax(noise, sampling.temperature) if rule is match and sampling.plain_gumbel_max else None
    candidate_temperature = sampling.temperature if sampling.needs_candidates else 0.0
    found_without_logits = gumbel_max or candidate_temperature or (rule is match and sampling.plain_argmax)
    return _NeededOutputs(gumbel_max, candidate_temperature, reads_logits or not found_without_logits)


def _draft(
    drafters: Sequence[Drafter], draft_calls: DraftModelCalls, canvas: Canvas, max_depth: int, calls_models: bool
) -> Generator[ForwardInputs, ForwardOutputs, list[Drafts]]:
    """What drafters offer in a step: those that call draft models come last, and not at all unless `calls_models`."""
    drafted: list[Drafts] = []
    waiting: list[tuple[Drafter, DraftGenerator]] = []
    for drafter in drafters if max_depth else ():
        drafts = drafter(canvas, draft_calls.last, max_depth)
        if isinstance(drafts, Generator):
            waiting.append((drafter, drafts))
        else:
            drafted += checked_drafts(drafter, drafts, draft_calls.vocab)
    for drafter, drafts in waiting if calls_models else ():
        drafted = yield from draft_calls.draft(drafter, drafts, drafted, max_depth)
    return drafted


def _verify(distributions: TargetDistributions, rule: Rule, stop: StopCondition | None) -> tuple[Step, bool]:
    """The step that a call decides, and whether it ends the text."""
    inputs = distributions.inputs
    tokens, node = rule(inputs, distributions)
    padding = distributions.num_padding_after(tokens) if distributions.sampling.hole_end_tokens else 0
    if padding:
        tokens = np.append(tokens, tokens[-1:].repeat(padding))
    end = stop(inputs.canvas, tokens) if stop else None
    if end is not None:  # which may cut off some of the padding
        padding = max(padding - (len(tokens) - end), 0)
    step = Step(inputs.canvas, inputs, distributions.outputs, distributions, tokens[:end], node, padding)
    return step, end is not None
