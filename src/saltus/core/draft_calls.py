"""Call draft models in the steps of one text in which their calls may pay, and record what they take and bring."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch

from saltus.core.control.controller import Controller
from saltus.core.distributions import Step
from saltus.core.forward import TARGET, ForwardInputs, ForwardOutputs
from saltus.core.protocols import Drafter, DraftGenerator, UsesHiddenStates, checked_draft_call, checked_drafts
from saltus.core.tree import Drafts

FORGET = 0.95  # of what a call of a draft model took is kept for each step without one
MAX_DRAFT_CONTEXT = 12  # decided tokens: a draft call that reads more than these and the last step's reads a prompt,
# or what was decided during a pause, and its time says nothing of what drafting costs


@dataclass
class StepCalls:
    """The calls of draft models in one step of a text."""

    asked: bool = False  # a drafter that may be switched off was asked
    seconds: float = 0.0  # that they took
    waited: float = 0.0  # seconds until their outputs came, in which other texts of the batch had their calls, too
    read_prompt: bool = False
    latest: float = 0.0  # seconds of the latest one; 0 if it read a prompt


@dataclass
class DraftModelCalls:
    """The calls of draft models for one text."""

    controller: Controller
    vocab: int | None  # the number of tokens that the target can read
    seconds_before: float = 0.0  # that the calls of a step took before, less after steps without a call
    num_read: int = 0  # decided tokens that the draft model has read
    last: Step | None = None  # the step before
    step: StepCalls = field(default_factory=StepCalls)  # of the present step

    def begin_step(self, last: Step | None) -> StepCalls:
        """The record of the calls of a new step, after the `last` one."""
        self.last, self.step = last, StepCalls()
        return self.step

    def draft(
        self, drafter: Drafter, drafts: DraftGenerator, drafted: list[Drafts], max_depth: int
    ) -> Generator[ForwardInputs, ForwardOutputs, list[Drafts]]:
        """What was drafted in this step, and what a drafter adds by calls; nothing where a call cannot pay."""
        self.step.asked = True
        controller, started, waited = self.controller, time.perf_counter(), self.step.waited
        if reads_text := not isinstance(drafter, UsesHiddenStates):
            record, offered = controller.draft_model, controller.offered_tree(drafted, max_depth)
            record.record_step(self._tokens_of_last(), controller.draft_model_saves(offered, 0.0))
            self.seconds_before = self.seconds_before or record.step_seconds
            pays = not drafted or controller.draft_model_saves(offered, self.seconds_before) >= 0
        else:
            offered = None
            pays = controller.first_draft_call_pays(drafted, max_depth, self.seconds_before)
        if not pays:
            self.seconds_before *= FORGET  # so that one call which was disturbed does not end them
            return drafted
        made = yield from self._pass_on(drafter, drafts, reads_text, not drafted)
        with_made = [*drafted, *checked_drafts(drafter, made, self.vocab)]
        self.seconds_before = self.step.latest or self.seconds_before
        if offered is not None and self.step.seconds and not self.step.read_prompt:
            seconds = self.step.seconds + time.perf_counter() - started - (self.step.waited - waited)
            controller.record_draft_calls(offered, controller.offered_tree(with_made, max_depth), seconds)
            self.seconds_before = controller.draft_model.step_seconds
        return with_made

    def _tokens_of_last(self) -> int:
        return len(self.last.tokens) if self.last is not None else 0

    def _pass_on(
        self, drafter: Drafter, drafts: DraftGenerator, reads_text: bool, drafts_alone: bool
    ) -> Generator[ForwardInputs, ForwardOutputs, Sequence[Drafts]]:
        """Pass on the forward passes of a drafter, and record them; returns its branches.

        It makes none where it would have to read a prompt first, and that cannot pay. One that goes on gets no logits,
        and ends its branch, where a further call would not pay.
        """
        try:
            inputs = checked_draft_call(drafter, next(drafts))
            num_decided = len(inputs.canvas.decided_prefix)
            if reads_text and inputs.network_name != TARGET and not self._may_read(inputs, num_decided, drafts_alone):
                drafts.close()
                return ()
            while True:
                known = checked_draft_call(drafter, inputs).draft_probabilities
                if known and not self.controller.draft_call_pays(math.prod(known), self.step.latest, len(known)):
                    inputs = drafts.send(ForwardOutputs(torch.empty(0, 0)))
                    continue
                started = time.perf_counter()
                outputs = yield inputs
                self._record(outputs, time.perf_counter() - started)
                self.num_read = num_decided
                inputs = drafts.send(outputs)
        except StopIteration as end:
            return end.value

    @property
    def _max_context(self) -> int:
        """Tokens that a call reads which is no prefill."""
        return max(MAX_DRAFT_CONTEXT, self._tokens_of_last() + 1)

    def _may_read(self, inputs: ForwardInputs, num_decided: int, drafts_alone: bool) -> bool:
        """True if a draft model has read all but the latest tokens, or if it pays to read what it has not."""
        num_unread, num_open = num_decided - self.num_read, len(inputs.canvas.open_positions)
        return num_unread <= self._max_context or self.controller.reading_pays(num_unread, num_open, drafts_alone)

    def _record(self, outputs: ForwardOutputs, waited: float) -> None:
        num_read = outputs.context_tokens_read
        read_prompt = num_read > self._max_context
        if read_prompt:
            self.controller.draft_model.record_prompt(num_read, outputs.seconds)
        self.step.latest = 0.0 if read_prompt else outputs.seconds
        self.step.seconds += outputs.seconds
        self.step.waited += waited
        self.step.read_prompt |= read_prompt
