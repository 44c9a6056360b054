"""A method with its networks, and what was measured of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import Any

from saltus.core.canvas import Canvas
from saltus.core.control.acceptance import Acceptance
from saltus.core.control.call_cost import CallCost
from saltus.core.control.controller import Controller
from saltus.core.control.draft_model_record import DraftModelRecord
from saltus.core.distributions import Step
from saltus.core.forward import TARGET
from saltus.core.noise import Noise
from saltus.core.protocols import (
    Drafter,
    LearnsFromTexts,
    Network,
    UsesCorpus,
    UsesHiddenStates,
    UsesMemory,
    UsesNgramModel,
    UsesReferences,
)
from saltus.core.rules import RULES
from saltus.engine.calibration import CALIBRATION_ROWS, call_seconds
from saltus.engine.heterogeneous_vocabularies import VocabularyTranslation, translating_drafter
from saltus.engine.request import Request
from saltus.methods import Method
from saltus.methods.shared.hidden_state_drafter import MAX_UNREAD, HiddenStateDrafter
from saltus.methods.shared.ngram_corpus import NgramCorpus
from saltus.methods.shared.ngram_model import NgramModel
from saltus.models.protocols import ReadsHiddenStates

MAX_GROUPS = 16  # of requests, whose drafters keep what they learned


@dataclass
class DecodingSetup:
    """Methods, the networks that they use, and what was measured about both."""

    methods: Sequence[Method]
    networks: Mapping[str, Network]  # "target", and the draft models by their names
    rule: str = "match"
    max_draft_tokens: int = 16  # draft tokens of a call, at most
    adaptive: bool = True
    context_lengths: Mapping[str, int | None] = field(default_factory=dict)  # of draft models: tokens that they read
    call_cost: CallCost = field(default_factory=CallCost)
    corpus: NgramCorpus | None = None  # that drafters may copy from
    ngram_model: NgramModel | None = None  # that drafters may fall back on
    acceptance: Acceptance = field(default_factory=Acceptance)
    controllers: dict[int, Controller] = field(default_factory=dict)  # by batch size
    # what drafters learned, by the request's group, the least recently used first, and by the method
    learned: OrderedDict[str, dict[type[Any], Any]] = field(default_factory=OrderedDict)
    translations: Mapping[str, VocabularyTranslation] = field(default_factory=dict)  # for draft models, by their names
    draft_model: DraftModelRecord = field(default_factory=DraftModelRecord)  # of the one that reads the text itself

    def __post_init__(self) -> None:
        """Raise ValueError if a method needs an any-subset target and the target decodes left to right."""
        needs_any_subset = any(getattr(method, "any_subset", False) for method in self.methods)
        if needs_any_subset and not getattr(self.networks[TARGET], "any_subset", True):
            raise ValueError(
                "assd drafts by a model that fills holes anywhere, but this one writes from left to right; take another"
                " model, such as stories, or the option assd.draft=bigram"
            )
        of_target = _num_bytes(self.networks[TARGET])
        for name, network in self.networks.items():
            reads_text = name != TARGET and not isinstance(network, ReadsHiddenStates)
            if reads_text and of_target and (size := _num_bytes(network)):
                self.draft_model.relative_size = size / of_target

    def new_drafters(self, request: Request) -> list[Drafter]:
        """The methods' drafters for one request; some methods have none (plain)."""
        made, learned = [], self._learned_of(request.group)
        for method in self.methods:
            drafter = self._new_drafter(method, request)
            if drafter is not None:
                self._supply(drafter, request)
                set_max_unread(drafter, method, self.networks)
                if isinstance(drafter, LearnsFromTexts) and self.rule == "match":  # under others drafts change the text
                    drafter.learned = learned.setdefault(type(method), drafter.learned)
                made.append(self._for_draft_models(drafter, method.draft_models))
        return made

    def _supply(self, drafter: Drafter, request: Request) -> None:
        """Give a drafter what it can copy from."""
        if request.prediction and isinstance(drafter, UsesReferences):
            drafter.add_reference(request.prediction, True)
        if request.memory is not None and isinstance(drafter, UsesMemory):
            drafter.memory = request.memory
        if self.corpus is not None and isinstance(drafter, UsesCorpus):
            drafter.corpus = self.corpus
        if self.rule == "match" and isinstance(drafter, UsesNgramModel):  # under others all drafts are verified
            drafter.ngram_model = self.ngram_model

    def _for_draft_models(self, drafter: Drafter, names: Collection[str]) -> Drafter:
        """The drafter in the vocabularies of its draft models, whose drafts end with their contexts."""
        for name in names:
            if name in self.translations:
                drafter = translating_drafter(drafter, self.translations[name])
        limits = [limit for name in names if (limit := self.context_lengths.get(name)) is not None]
        return _limit_to_context(min(limits), drafter) if limits else drafter

    def _learned_of(self, group: str) -> dict[type[Any], Any]:
        """What drafters learned from the texts of a group; of too many groups the least recently used is forgotten."""
        learned = self.learned.setdefault(group, {})
        self.learned.move_to_end(group)
        if len(self.learned) > MAX_GROUPS:
            self.learned.popitem(last=False)
        return learned

    def num_unread_states(self, request: Request) -> int:
        """Tokens at the end of a prompt that the target should read itself: drafters read their hidden states."""
        drafters = [self._new_drafter(method, request) for method in self.methods]  # without its prediction, to be fast
        return MAX_UNREAD if any(isinstance(each, UsesHiddenStates) for each in drafters) else 0

    def _new_drafter(self, method: Method, request: Request) -> Drafter | None:
        return method.drafter(Noise(request.seed), request.sampling, RULES[self.rule])

    @property
    def chooses_sizes(self) -> bool:
        """True if calls carry as many draft tokens as pay."""
        return self.rule == "match" and self.adaptive

    def controller(self, batch_size: int) -> Controller:
        """The controller for `batch_size` requests at once.

        Under `match` it cannot change a text, so requests share one that learns. Under `reject` the shape of the draft
        tree decides which tokens are sampled, so its size is fixed.
        """
        if not self.chooses_sizes:
            return Controller(self.max_draft_tokens, adaptive=False)
        self.time_calls()
        if batch_size not in self.controllers:
            costs = self.call_cost if batch_size == 1 else self._costs_of_batch(batch_size)
            self.controllers[batch_size] = Controller(self.max_draft_tokens, True, self.acceptance, costs, batch_size)
        return self.controllers[batch_size]

    def time_calls(self) -> None:
        """Time calls of the target by their rows, unless that is done; a text that drafts does so at its beginning."""
        if not self.call_cost.seconds:
            self.call_cost.seconds.update(call_seconds(self.networks[TARGET]))

    def _costs_of_batch(self, batch_size: int) -> CallCost:
        """Costs by the rows of each text, so batch_size times the rows: at first those that are known of fewer texts,
        then by the batch's own calls.
        """
        return CallCost({rows: self.call_cost.seconds_for(rows * batch_size) for rows in CALIBRATION_ROWS})


def _num_bytes(network: Network) -> int:
    """Bytes of a network's weights; 0 if it does not tell."""
    model = getattr(network, "model", None)
    return 0 if model is None else sum(weight.nbytes for weight in model.parameters())


def set_max_unread(drafter: Drafter, method: Method, networks: Mapping[str, Network]) -> None:
    """Let a drafter keep as many hidden states as its draft network reads at once."""
    for network in (networks.get(name) for name in method.draft_models):
        if isinstance(drafter, HiddenStateDrafter) and isinstance(network, ReadsHiddenStates):
            drafter.max_unread = network.max_unread


def _limit_to_context(context_length: int, drafter: Drafter) -> Drafter:
    """The drafter, whose drafts end where the text outgrows what its draft model reads."""

    def limited(canvas: Canvas, last: Step | None, max_depth: int) -> Any:
        depth = min(max_depth, context_length - len(canvas.decided_prefix))
        return drafter(canvas, last, depth) if depth > 0 else ()

    return update_wrapper(limited, drafter, updated=())
