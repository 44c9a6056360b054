"""Decode one text: draft, verify in one call, accept, until no hole is left. The one loop of every method."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence

import numpy as np

from saltus.core.canvas import Canvas
from saltus.core.constraint import Constraint, constrained_branches
from saltus.core.control.controller import Controller
from saltus.core.distributions import DecodeGenerator, Step, TargetDistributions
from saltus.core.draft_calls import DraftCalls, DraftGenerator
from saltus.core.forward import ForwardInputs, GumbelMax
from saltus.core.noise import Noise
from saltus.core.protocols import Drafter, FusedDrafter, StopCondition, UsesCandidates, UsesHiddenStates, checked_drafts
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
    readers = [
        drafter for drafter in drafters if isinstance(drafter, UsesHiddenStates) and drafter.output_hidden_states
    ]
    fused = [drafter for drafter in drafters if isinstance(drafter, FusedDrafter)]
    gumbel_max = None
    if rule is match and sampling.plain_gumbel_max and constraint is None:
        gumbel_max = GumbelMax(noise, sampling.temperature)
    candidate_temperature = sampling.temperature if sampling.needs_candidates and constraint is None else 0.0
    reads_logits |= constraint is not None or not (
        gumbel_max or candidate_temperature or (rule is match and sampling.plain_argmax)
    )
    drafts_candidates = any(isinstance(drafter, UsesCandidates) for drafter in drafters)
    last: Step | None = None
    draft_calls = DraftCalls(controller, vocab)
    controller.draft_model.begin_text()
    while len(canvas.open_positions):
        # The distribution after the last accepted node decides one hole more than the tree is deep.
        max_depth = min(len(canvas.open_positions) - 1, controller.max_draft_tokens)
        drafted: list[Drafts] = []
        waiting: list[tuple[Drafter, DraftGenerator]] = []  # these call draft models, after all others have drafted
        draft_calls.begin_step(last)
        started = time.perf_counter()
        can_pay = controller.can_pay()
        should_draft = controller.should_draft() and can_pay
        asked = drafters if can_pay else readers  # which keep the states of every step
        for drafter in asked if max_depth else ():
            drafts = drafter(canvas, last, max_depth)
            if isinstance(drafts, Generator):
                waiting.append((drafter, drafts))
            else:
                drafted += checked_drafts(drafter, drafts, vocab)
        for drafter, drafts in waiting if should_draft else ():
            drafted = yield from draft_calls.draft(drafter, drafts, drafted, max_depth)
        if constraint is not None and drafters and max_depth:
            drafted = [*constrained_branches(drafted, constraint, canvas.new_tokens.tolist(), max_depth)]
        offered = controller.offered_tree(drafted, max_depth)
        tree = offered.prune(controller.num_nodes(offered))
        hidden_states = any(controller.needs_hidden_states(reader.max_unread) for reader in readers)
        draft_distributions = tree.distributions if any(tree.distributions) else None
        inputs = ForwardInputs(
            canvas, tree.tokens, tree.parents, hidden_states, draft_distributions=draft_distributions,
            gumbel_max=gumbel_max,
            candidate_temperature=candidate_temperature or float(drafts_candidates and should_draft),
            reads_logits=reads_logits, drafts=drafted,
        )  # fmt: skip
        for drafter in fused if should_draft else ():
            probabilities = list(map(controller.calibrated_probability, tree.sources, tree.acceptance_probabilities))
            inputs = drafter.add_draft_queries(inputs, probabilities, controller)
        other_seconds = time.perf_counter() - started - draft_calls.waited
        outputs = yield inputs
        started = time.perf_counter()
        distributions = TargetDistributions(inputs, outputs, sampling, noise, constraint)
        tokens, node = rule(inputs, distributions)
        padding = distributions.num_padding_after(tokens) if sampling.hole_end_tokens else 0
        if padding:
            tokens = np.append(tokens, tokens[-1:].repeat(padding))
        end = stop(canvas, tokens) if stop else None
        # Padding that the end of the text cuts off does not count.
        padding = padding if end is None else max(padding - (len(tokens) - end), 0)
        is_first = last is None  # such a step may time calls, index the prompt, and import what was not needed yet
        last = Step(canvas, inputs, outputs, distributions, tokens[:end], node, padding)
        other_seconds += time.perf_counter() - started
        drafters_on = draft_calls.asked or (should_draft and bool(fused))
        seconds = None if draft_calls.read_prompt else draft_calls.seconds
        controller.record(offered, last, seconds, 0.0 if is_first else other_seconds, drafters_on)
        canvas = canvas.fill(last.tokens)
        on_step(last)
        if end is not None:
            break
    controller.draft_model.end_text(canvas.num_decided)
