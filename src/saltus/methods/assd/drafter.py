"""Draft several holes from an any-subset model itself, which also verifies them, or from bigram counts (ASSD)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from saltus.core.canvas import HOLE, Canvas
from saltus.core.control.controller import Controller
from saltus.core.coupling import draft_tokens
from saltus.core.distributions import Step
from saltus.core.forward import ForwardInputs
from saltus.core.noise import Noise
from saltus.core.picking import Distribution, probability, sample
from saltus.core.protocols import Drafter
from saltus.core.rules import Rule, reject
from saltus.core.sampling import Sampling, log_probability, token_distribution
from saltus.core.tree import Branch, DraftNodes, Drafts, first_tokens
from saltus.core.value_types import require_at_least
from saltus.methods.assd.hole_predictions import AnySubsetOutputs, HoleLogits, HolePredictions
from saltus.methods.shared.draft_tree import chooser, likely_paths
from saltus.methods.shared.logit_correction import PairwiseCorrection
from saltus.methods.shared.query_chains import two_call_drafter, with_query_chains

SOURCE = "assd"
PAUSE_CALLS = 32  # calls without drafts, where they did not pay


@dataclass(frozen=True)
class Assd:
    """Any-subset speculative decoding (ASSD, Guo and Ermon 2025): fill several holes in a call.

    The model predicts the next holes independently, each from the decided tokens, and the same model verifies these
    drafts, so that the text follows its joint distribution (Alg. 1). Verification calls predict many holes ahead, so
    that a step is one call and not two. With `bigram`, drafts come from counts of neighbouring tokens in the text
    (Alg. 2), which any model can verify, also a causal one.
    """

    draft: Literal["self", "bigram"] = "self"  # who drafts: the model, or counts of neighbouring tokens in the text
    num_draft_tokens: int = 2  # of a path, at most
    top_k: int = 2  # tokens that may follow a token of the draft tree; `reject` drafts one path
    ahead: int = 8  # holes that a verification call predicts; at least two for each draft token
    two_calls: bool = False  # draft in a call of its own, as in the paper

    def __post_init__(self) -> None:
        require_at_least(self, "assd: ", num_draft_tokens=1, top_k=1, ahead=1)
        if self.draft not in ("self", "bigram"):
            raise ValueError(f"assd: draft is {self.draft!r}, but must be self or bigram")

    @property
    def draft_models(self) -> dict[str, str]:
        return {}

    @property
    def any_subset(self) -> bool:
        """True if it needs a model that fills holes anywhere."""
        return self.draft == "self"

    def drafter(self, noise: Noise, sampling: Sampling, rule: Rule) -> Drafter:
        if self.draft == "bigram":
            return BigramDrafter(noise, sampling, rule, self.num_draft_tokens)
        if self.two_calls:
            return two_call_drafter(noise, sampling, rule, "independent", self.num_draft_tokens, source=SOURCE)
        return SelfDrafter(
            noise, sampling, rule, self.num_draft_tokens, max(self.ahead, 2 * self.num_draft_tokens), self.top_k
        )


@dataclass
class SelfDrafter:
    """Drafts from logits of the holes ahead, which an earlier verification call computed.

    These logits do not depend on each other's tokens, nor on tokens decided since; the model's pairwise correction adds
    the effect of the tokens to the left, which is most of what they lack. Under `reject` drafts are sampled with
    uniforms of their own, and the rule gets the draft distributions. Each step uses new uniforms: the sampled tokens
    may influence when logits are computed, so the same logits must not be sampled twice with the same uniforms.
    """

    noise: Noise
    sampling: Sampling
    rule: Rule
    num_draft_tokens: int
    ahead: int
    top_k: int  # tokens that may follow a token of the draft tree
    hole_logits: dict[int, HoleLogits] = field(default_factory=dict)  # by position
    pairwise_correction: PairwiseCorrection | None = None
    first_drafts: set[int] = field(default_factory=set)  # the first draft tokens of this step's paths
    paused_calls: int = 0  # calls for which predicting ahead stays off

    def __call__(self, canvas: Canvas, last: Step | None, max_depth: int) -> Sequence[Drafts]:
        if last is not None:
            self._store_logits(last)
        if not self.hole_logits:
            self.first_drafts = set()
            return ()
        holes = self._predicted_holes(canvas, min(self.num_draft_tokens, max_depth))
        drafts: Sequence[Drafts] = []
        if holes:
            drafts = self._sampled_path(canvas, holes) if self.rule is reject else self._likely_paths(canvas, holes)
        self.first_drafts = first_tokens(drafts)
        return drafts

    @cached_property
    def _banned(self) -> np.ndarray:
        return np.array(self.sampling.banned, dtype=np.int64)

    @cached_property
    def _last_tokens(self) -> frozenset[int]:
        return frozenset(token for token, _, _ in self.sampling.hole_end_tokens)

    def _predicted_holes(self, canvas: Canvas, count: int) -> list[HoleLogits]:
        """The predictions of the next open positions, as far as there are any."""
        known = takewhile(lambda position: position in self.hole_logits, canvas.open_positions[:count].tolist())
        return [self.hole_logits[position] for position in known]

    def _likely_paths(self, canvas: Canvas, holes: Sequence[HoleLogits]) -> list[DraftNodes]:
        sampling = self.sampling
        unknown = [hole.num_unknown(canvas.order, index) for index, hole in enumerate(holes, canvas.num_decided)]
        predictions = HolePredictions(holes, unknown, self.pairwise_correction, self._banned, self._last_tokens)
        choose = chooser(self.top_k, sampling, self.rule, self.noise, canvas.open_positions)
        return likely_paths(predictions, canvas.new_tokens[-2:].tolist(), choose, SOURCE)

    def _sampled_path(self, canvas: Canvas, holes: Sequence[HoleLogits]) -> list[Branch]:
        """One path, whose tokens are sampled with uniforms that nothing else uses."""
        builder = _BranchBuilder(SOURCE, self.noise, self.sampling, _first_fresh(canvas, self.rule))
        context = canvas.tokens[canvas.known_positions] if self.sampling.uses_context else None
        latest = canvas.new_tokens[-2:].tolist()
        for index, hole in enumerate(holes, start=canvas.num_decided):
            seen = None if context is None else np.append(context, builder.tokens).astype(np.int64)
            unknown = hole.num_unknown(canvas.order, index)
            logits = torch.from_numpy(hole.corrected(self.pairwise_correction, unknown, [*latest, *builder.tokens]))
            builder.add(token_distribution(logits, self.sampling, seen, index), int(canvas.order[index]), logits)
            if self.sampling.num_padding_after(index, builder.tokens[-1]):
                break
        return builder.branches()

    def _store_logits(self, last: Step) -> None:
        """Keep what the step predicted for holes that are still open."""
        canvas, outputs = last.canvas, last.outputs
        self.pairwise_correction = outputs.correction if isinstance(outputs, AnySubsetOutputs) else None
        if last.inputs.query_nodes and (queries := last.inputs.query_chain(-1)):
            for hole, query in zip(canvas.open_positions[: len(queries)].tolist(), queries, strict=True):
                self.hole_logits[hole] = HoleLogits(outputs, query + 1, canvas.num_decided)
        if self.hole_logits:
            for hole in canvas.open_positions[: len(last.tokens)].tolist():
                self.hole_logits.pop(hole, None)

    def add_draft_queries(
        self, inputs: ForwardInputs, probabilities: Sequence[float], controller: Controller
    ) -> ForwardInputs:
        """Add queries that predict the holes ahead, unless the known logits suffice for the next drafts."""
        taken = any(inputs.tokens[node] in self.first_drafts for node in inputs.children(-1))
        if controller.adaptive and self.first_drafts and not taken:
            self.paused_calls = PAUSE_CALLS
        self.paused_calls = max(self.paused_calls - 1, 0)
        holes = inputs.canvas.open_positions[: self.ahead].tolist()
        needed = holes[1 : max(inputs.depths, default=-1) + 2 + self.num_draft_tokens]
        if not controller.max_draft_tokens or self.paused_calls or all(hole in self.hole_logits for hole in needed):
            return inputs
        inputs = with_query_chains(inputs, [(-1, [math.nan] * len(holes))], self.sampling.temperature)
        return replace(inputs, output_hidden_states=self.pairwise_correction is not None or not self.hole_logits)


def _first_fresh(canvas: Canvas, rule: Rule) -> int | None:
    """Under `reject`, where in the stream of the drafts this step's own uniforms begin, which no other step uses."""
    return canvas.num_decided * len(canvas.order) if rule is reject else None


@dataclass
class _BranchBuilder:
    """Builds a branch token by token, with the text's own random numbers or, for the rule `reject`, with others."""

    source: str
    noise: Noise
    sampling: Sampling
    first_fresh: int | None
    tokens: list[int] = field(default_factory=list)
    acceptance_probabilities: list[float] = field(default_factory=list)
    distributions: list[Distribution] = field(default_factory=list)

    def add(self, distribution: Distribution, hole: int, logits: Tensor | None = None) -> None:
        """Add a token of the distribution. For sampled drafts the stated probability must not depend on the token.

        A greedy distribution is always certain: its probability comes from the `logits`, where there are any.
        """
        if self.first_fresh is not None:
            token = sample(self.noise.uniform(SOURCE, self.first_fresh + len(self.tokens)), distribution)
            stated = distribution.peak
        elif self.sampling.greedy:
            place = int(distribution.weights.argmax())
            token = place if distribution.tokens is None else int(distribution.tokens[place])
            stated = probability(token, distribution) if logits is None else math.exp(log_probability(logits, token))
        else:
            token, stated = draft_tokens(distribution, self.noise, "text", hole)[0]
        self.tokens.append(token)
        self.distributions.append(distribution)
        self.acceptance_probabilities.append(stated)

    def branches(self) -> list[Branch]:
        distributions = None if self.first_fresh is None else self.distributions
        return [Branch(self.tokens, self.acceptance_probabilities, self.source, distributions)] if self.tokens else []


@dataclass
class BigramDrafter:
    """Drafts from counts of neighbours in the decided text, each token given the one to its left (Alg. 2)."""

    noise: Noise
    sampling: Sampling
    rule: Rule
    num_draft_tokens: int
    counts: defaultdict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    counted: set[int] = field(default_factory=set)  # positions whose left neighbour was counted

    def __call__(self, canvas: Canvas, last: Step | None, max_depth: int) -> Sequence[Branch]:
        self._count(canvas, last)
        holes = canvas.open_positions[: min(self.num_draft_tokens, max_depth)]
        text = canvas.tokens.copy()
        builder = _BranchBuilder(f"{SOURCE}/bigram", self.noise, self.sampling, _first_fresh(canvas, self.rule))
        for hole in holes.tolist():
            followers = self.counts.get(int(text[hole - 1])) if hole else None
            if not followers:
                break
            ids = np.array(sorted(followers), dtype=np.int64)
            counts = np.array([followers[token] for token in ids.tolist()], dtype=np.float64)
            builder.add(Distribution(ids, counts, self.sampling.coupling), hole)
            text[hole] = builder.tokens[-1]
        return builder.branches()

    def _count(self, canvas: Canvas, last: Step | None) -> None:
        """Count pairs of decided neighbours that were not counted before."""
        places = canvas.given_positions if last is None else canvas.order[last.canvas.num_decided : canvas.num_decided]
        text = canvas.tokens
        for place in {*places.tolist(), *(places + 1).tolist()}:
            pair = 0 < place < len(text) and text[place] != HOLE and text[place - 1] != HOLE
            if pair and place not in self.counted:
                self.counted.add(place)
                self.counts[int(text[place - 1])][int(text[place])] += 1
