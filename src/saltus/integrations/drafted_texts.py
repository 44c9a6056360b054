"""Draft for texts that another engine decodes: it verifies, so each text's drafters see only what was decided."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saltus.core.batch import SequenceState, run_batch
from saltus.core.canvas import Canvas, continuation
from saltus.core.control.acceptance import Acceptance
from saltus.core.distributions import DecodeGenerator, Step, TargetDistributions
from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.core.noise import Noise
from saltus.core.protocols import Drafter, DraftResult, Network, UsesHiddenStates, UsesNgramModel, checked_drafts
from saltus.core.rules import match
from saltus.core.sampling import Sampling
from saltus.core.tree import Drafts, Tree, grow_tree
from saltus.engine.decoding_setup import set_max_unread
from saltus.engine.sample_texts import load_ngram_model, take_ngram_model
from saltus.loading.fetching import first_line
from saltus.methods import Method
from saltus.methods.shared.ngram_model import NgramModel

log = logging.getLogger("saltus")

TREE_NODES = 32  # of the tree that a text's drafters offer together
NO_TREE = grow_tree((), 0, 0)


@dataclass(eq=False)
class DraftedText:
    """One running text of the other engine."""

    drafters: Sequence[Drafter]
    noise: Noise
    sampling: Sampling
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # at the last offer
    offered: Tree = NO_TREE
    kv_caches: dict[str, Any] = field(default_factory=dict)  # of draft networks


@dataclass(frozen=True)
class DraftRequest:
    """A text for which a tree is wanted: its tokens now, and how many draft tokens may follow.

    `hidden_states` are those of the target at the last positions that the step computed, each before the token that
    follows it; None where the engine has none, and then draft models are left out.
    """

    text: DraftedText
    tokens: np.ndarray
    max_depth: int
    hidden_states: Tensor | None = None


@dataclass
class Drafting:
    """Methods and their networks, and how often their drafts were accepted, over all texts."""

    methods: Sequence[Method]
    networks: Mapping[str, Network] = field(default_factory=dict)
    acceptance: Acceptance = field(default_factory=Acceptance)
    ngram_model: NgramModel | None = None  # see UsesNgramModel
    num_token_ids: int | None = None  # of the target's vocabulary, where the engine says it
    network_seconds: float = field(default=0.0, init=False)  # of draft networks, in the last call of `trees`

    def new_text(self, noise: Noise = Noise(0), sampling: Sampling = Sampling()) -> DraftedText:  # noqa: B008 (frozen)
        """A text that has no drafts yet. The defaults are for greedy decoding, and where random numbers are unknown."""
        drafters = []
        for method in self.methods:
            if (drafter := method.drafter(noise, sampling, match)) is not None:
                set_max_unread(drafter, method, self.networks)
                if isinstance(drafter, UsesNgramModel):
                    drafter.ngram_model = self.ngram_model
                drafters.append(drafter)
        return DraftedText(drafters, noise, sampling)

    def trees(self, requests: Sequence[DraftRequest], use_networks: bool = True) -> list[Tree]:
        """A draft tree for each text, and a record of which drafts of the one before were right.

        Draft networks run in one batch for all texts.
        """
        branches: list[list[Drafts]] = []
        generators: list[SequenceState] = []
        for request in requests:
            text, text_branches = request.text, []
            new = request.tokens[len(text.tokens) :].tolist()
            if len(text.tokens):
                self.acceptance.record_tree(text.offered, new)
            canvas = continuation(self._known(request.tokens), request.max_depth + 1)
            for drafter in text.drafters if request.max_depth > 0 else ():
                drafts = _drafts(drafter, canvas, request, len(new))
                if not isinstance(drafts, Generator):
                    text_branches += checked_drafts(drafter, drafts, self.num_token_ids)
                elif use_networks:
                    generators.append(SequenceState(self._collected(drafter, drafts, text_branches), text.kv_caches))
            text.tokens = request.tokens.copy()
            branches.append(text_branches)
        started, num_drafting = time.perf_counter(), len(generators)
        for _ in run_batch(generators, self.networks):
            pass
        self.network_seconds = time.perf_counter() - started if num_drafting else 0.0
        calibrate = self.acceptance.calibrated_probability
        for request, text_branches in zip(requests, branches, strict=True):
            request.text.offered = grow_tree(text_branches, TREE_NODES, request.max_depth, calibrate)
        return [request.text.offered for request in requests]

    def _known(self, tokens: np.ndarray) -> np.ndarray:
        """The tokens without ids that the vocabulary lacks, which stand for images: a copy of them is no draft."""
        size = self.num_token_ids
        return tokens if size is None else np.where((tokens >= 0) & (tokens < size), tokens, 0)

    def _collected(self, drafter: Drafter, drafts: Any, branches: list[Drafts]) -> DecodeGenerator:
        """Run a drafter's calls and add its branches to the list."""
        branches += checked_drafts(drafter, (yield from drafts), self.num_token_ids)


def ngram_model_of(
    methods: Sequence[Method], tokenizer: str | None, num_token_ids: int | None, **settings: Any
) -> NgramModel | None:
    """The n-gram model in the tokens of the engine's tokenizer, a folder or a name on the hub, if a method takes one.

    `settings` are those of Transformers' AutoTokenizer. None with a warning where it does not load, as may be with
    tokenizers that the engine alone knows.
    """
    if not take_ngram_model(methods) or tokenizer is None or num_token_ids is None:
        return None
    from transformers import AutoTokenizer

    try:
        return load_ngram_model(AutoTokenizer.from_pretrained(tokenizer, **settings), num_token_ids)
    except Exception as error:  # in many ways
        reason = f"the tokenizer {tokenizer} does not load ({first_line(error)})"
        log.warning("lookup drafts without its n-gram model: %s", reason)
        return None


def _drafts(drafter: Drafter, canvas: Canvas, request: DraftRequest, num_new: int) -> DraftResult:
    """What a drafter offers, given a step that decided `num_new` tokens without a tree."""
    states = request.hidden_states
    if not isinstance(drafter, UsesHiddenStates):
        return drafter(canvas, None, request.max_depth)
    if states is None or not len(states):
        return ()
    inputs = ForwardInputs(canvas)
    outputs = ForwardOutputs(torch.empty(0, 0), states, context_tokens_read=len(states))
    distributions = TargetDistributions(inputs, outputs, request.text.sampling, request.text.noise)
    step = Step(canvas, inputs, outputs, distributions, request.tokens[len(request.tokens) - num_new :], -1)
    return drafter(canvas, step, request.max_depth)
