"""Define what a drafter and a network must offer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from saltus.core.canvas import Canvas
from saltus.core.control.controller import Controller
from saltus.core.distributions import Step
from saltus.core.draft_faults import draft_fault
from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.core.tree import Drafts
from saltus.core.value_types import short_repr

DraftGenerator = Generator[ForwardInputs, ForwardOutputs, Sequence[Drafts]]
"""Yields the forward passes of a draft model, if there is one, and returns branches."""

DraftResult = Sequence[Drafts] | DraftGenerator
"""Branches, or a generator that returns them, which is not run while its drafts do not pay for their time."""


@runtime_checkable
class Drafter(Protocol):
    """Proposes branches of draft tokens for one text.

    `last` is the previous step, None at first; `max_depth` is the largest useful depth of a branch. A returned
    generator may be dropped before it has started, see `DraftResult`.
    """

    def __call__(self, canvas: Canvas, last: Step | None, max_depth: int) -> DraftResult: ...


def checked_drafts(drafter: Drafter, returned: Any, vocab: int | None = None) -> Sequence[Drafts]:
    """What a drafter returned, itself or by its generator, for a vocabulary of so many tokens (None: not known).

    Errors: ValueError that names it if these do not fit.
    """
    if not isinstance(returned, Sequence) or not all(isinstance(each, Drafts) for each in returned):
        raise ValueError(
            f"the drafter {drafter_name(drafter)} returned {short_repr(returned)}; return a list of Branch, or () where"
            " it has none"
        )
    for each in returned:
        if fault := draft_fault(each, vocab):
            kind = type(each).__name__
            raise ValueError(f"the drafter {drafter_name(drafter)} returned a faulty {kind}: {fault}")
    return returned


def checked_draft_call(drafter: Drafter, yielded: Any) -> ForwardInputs:
    """What a drafter's generator yielded. Errors: ValueError that names the drafter if that is no forward pass."""
    if isinstance(yielded, ForwardInputs):
        return yielded
    raise ValueError(
        f"the drafter {drafter_name(drafter)} yielded {short_repr(yielded)}; yield ForwardInputs, and return a list of"
        " Branch"
    )


def drafter_name(drafter: Drafter) -> str:
    """Where a drafter, or what it is wrapped in, is defined; the name of its method is in it."""
    drafter = inspect.unwrap(drafter)
    return f"{drafter.__module__}.{getattr(drafter, '__qualname__', type(drafter).__qualname__)}"


@runtime_checkable
class FusedDrafter(Protocol):
    """A drafter that drafts inside the verification call: it adds query nodes to the tree that is verified.

    It is not asked for them while the controller finds that they do not pay.
    """

    def add_draft_queries(
        self, inputs: ForwardInputs, probabilities: Sequence[float], controller: Controller
    ) -> ForwardInputs:
        """The same inputs with query nodes appended; they do not count as draft tokens.

        `probabilities` are the acceptance probabilities of the draft tokens, given that their parents are accepted.
        """
        ...


@runtime_checkable
class UsesHiddenStates(Protocol):
    """A drafter that may need the target's hidden states: verification calls then return them.

    They are those before the output layer, behind those of the layers that its network has asked for
    (`add_hidden_state_layers`): [positions, layers · hidden].
    While its draft model is off for many steps they do not, and `last` has none.
    """

    output_hidden_states: bool
    max_unread: int  # hidden states that it reads at once, of a prompt or after a pause: the last ones


@runtime_checkable
class UsesCandidates(Protocol):
    """A drafter that reads the likeliest tokens after each node: a GPU finds those of all texts of a call at once."""

    uses_candidates: bool


@runtime_checkable
class UsesReferences(Protocol):
    """A drafter that can copy from other texts than its own."""

    def add_reference(self, tokens: Sequence[int], expected: bool) -> None:
        """Copy from these tokens, too; with `expected` the new text probably repeats them. Before the first step."""
        ...


@runtime_checkable
class UsesMemory(Protocol):
    """A drafter that can copy from earlier answers."""

    memory: Any  # an AnswerMemory, or None; set before the first step


@runtime_checkable
class UsesCorpus(Protocol):
    """A drafter that can copy from a corpus of other texts, which many texts share."""

    corpus: Any  # an NgramCorpus, or None; set before the first step


@runtime_checkable
class UsesNgramModel(Protocol):
    """A drafter that can fall back on what usually follows the last tokens, in whatever text."""

    ngram_model: Any  # an NgramModel, or None; set before the first step


@runtime_checkable
class LearnsFromTexts(Protocol):
    """A drafter that learns from the target's calls, and goes on with what was learned from earlier texts."""

    learned: Any  # set before the first step to that of an earlier text of the method, if there is one


@runtime_checkable
class Network(Protocol):
    """Evaluates forward passes, several texts in one call. A KV cache belongs to one text and one network."""

    def new_kv_cache(self) -> Any:
        """An empty KV cache for one text."""
        ...

    def forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[Any]) -> list[ForwardOutputs]:
        """One output for each input, in order; logits are [1 + nodes, vocab].

        Those of a draft network are whatever rows its drafter reads. Each text has its own cache, which is updated:
        entries that no longer agree with the canvas are dropped.
        """
        ...


@runtime_checkable
class ReadsTargetKVCache(Protocol):
    """A draft network that reads the target's KV caches and has none of its own: `forward` gets the target's.

    It must not write to them. They may lack the last decided tokens.
    """

    reads_target_kv_cache: bool


StopCondition = Callable[[Canvas, np.ndarray], int | None]
"""Given the canvas and the tokens just decided: how many of them to keep if the text ends there, else None.

The ending token is kept. It is called once a step, in order, and may keep state.
"""
