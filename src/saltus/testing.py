"""Toy networks for tests: their distributions can be enumerated, and they check their inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from saltus.core.batch import SequenceState, run_batch
from saltus.core.canvas import HOLE, continuation
from saltus.core.control.controller import Controller
from saltus.core.distributions import Step
from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.core.noise import Noise
from saltus.core.picking import pick, probabilities
from saltus.core.protocols import StopCondition
from saltus.core.rules import Rule, match
from saltus.core.sampling import Sampling, token_distribution
from saltus.core.speculate import speculate
from saltus.methods import make_methods
from saltus.methods.shared.hidden_state_drafter import MAX_UNREAD
from saltus.methods.shared.query_chains import UniformConditioning


@dataclass
class ToyKvCache:
    """The KV cache of a toy: the decided tokens of the last call."""

    decided: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    holds_drafts: bool = False  # a drafter that drafts token by token has read its own drafts, too


ToyAdapter = Callable[[tuple[int, int], Sequence[float]], Tensor]
"""The logits of a query, given the last two tokens before its chain and the uniforms down to it."""


@dataclass
class ToyNetwork:
    """A causal distribution given the last two tokens. It counts calls, and asserts that its inputs are well-formed.

    `allows_rewrites`: a draft model's text may change (its own drafts); the target's only grows. The hidden state of a
    token is its position, so that a drafter can check which hidden states it gets.
    """

    logits: Float[Tensor, "vocab vocab vocab"]
    name: str = "target"
    allows_rewrites: bool = False
    adapter: ToyAdapter | None = None  # answers query nodes
    calls: int = 0
    context_tokens_read: int = 0  # decided tokens, over all texts
    max_draft_tokens: int = 0  # draft tokens of one forward pass, at most
    num_queries: int = 0  # query nodes, over all texts

    def new_kv_cache(self) -> ToyKvCache:
        return ToyKvCache()

    def forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[ToyKvCache]) -> list[ForwardOutputs]:
        """One call: logits after the decided text and after each node."""
        assert batch, "a call carries at least one text"
        assert len({id(kv_cache) for kv_cache in kv_caches}) == len(batch) == len(kv_caches), (
            "one KV cache for each text"
        )
        self.calls += 1
        return [self._evaluate(inputs, kv_cache) for inputs, kv_cache in zip(batch, kv_caches, strict=True)]

    def _evaluate(self, inputs: ForwardInputs, kv_cache: ToyKvCache) -> ForwardOutputs:
        self.check(inputs, kv_cache)
        self.max_draft_tokens = max(self.max_draft_tokens, inputs.num_draft_tokens)
        decided = inputs.canvas.decided_prefix
        shared = min(len(kv_cache.decided), len(decided))
        differs = np.flatnonzero(kv_cache.decided[:shared] != decided[:shared])
        read = int(len(decided) - (differs[0] if len(differs) else shared))
        self.context_tokens_read += read
        if inputs.hidden_states is not None:
            shown = torch.arange(len(decided) - len(inputs.hidden_states), len(decided))[:, None] - 1
            assert torch.equal(inputs.hidden_states, shown), (
                "a drafter gets the hidden states before the tokens decided since"
            )
            assert len(inputs.hidden_states) > 0, "a drafter gets new hidden states"
            one_call = bool(inputs.query_nodes) and not kv_cache.holds_drafts
            after_rest = MAX_UNREAD <= len(inputs.hidden_states) < read
            assert not one_call or not len(kv_cache.decided) or read == len(inputs.hidden_states) or after_rest, (
                "each hidden state comes once"
            )
        else:
            kv_cache.holds_drafts = True
        kv_cache.decided = decided.copy()
        pairs = [self._last_two(decided.tolist())]
        for token, parent in zip(inputs.tokens[: inputs.num_draft_tokens], inputs.parents, strict=False):
            pairs.append((pairs[parent + 1][1], token))
        logits = self.logits[tuple(zip(*pairs, strict=True))]
        if inputs.query_nodes and self.adapter is not None:
            logits = torch.cat([logits, self._query_logits(inputs, pairs)])
        states = [*range(len(decided) - read, len(decided)), *(len(decided) + depth for depth in inputs.depths)]
        return ForwardOutputs(
            logits,
            torch.tensor(states, dtype=torch.float64)[:, None] if inputs.output_hidden_states else None,
            context_tokens_read=read,
        )

    def _query_logits(self, inputs: ForwardInputs, pairs: list[tuple[int, int]]) -> Tensor:
        assert self.adapter is not None
        self.num_queries += len(inputs.query_nodes)
        conditioning: dict[int, tuple[tuple[int, int], list[float]]] = {}
        for node in inputs.query_nodes:
            parent, u = inputs.parents[node], inputs.uniforms[node - inputs.num_draft_tokens]
            before, uniforms = conditioning.get(
                parent, (pairs[parent + 1] if parent < inputs.num_draft_tokens else None, [])
            )
            assert before is not None and (math.isnan(u) or 0 <= u < 1)
            conditioning[node] = before, [*uniforms, u]
        return torch.stack([self.adapter(*conditioning[node]) for node in inputs.query_nodes])

    @staticmethod
    def _last_two(text: list[int]) -> tuple[int, int]:
        return (0, *text)[-2], text[-1]

    def check(self, inputs: ForwardInputs, kv_cache: ToyKvCache) -> None:
        """Assert that the inputs are well-formed and fit the holes, and that the text only grows."""
        decided, vocab = inputs.canvas.decided_prefix, self.logits.shape[0]
        assert inputs.network_name == self.name, f"a Forward to {inputs.network_name} arrived at {self.name}"
        assert len(decided) and HOLE not in decided, "everything before the first hole is decided"
        nodes = inputs.tokens[: inputs.num_draft_tokens]
        assert all(0 <= token < vocab for token in (*nodes, *decided)), "tokens lie in the vocabulary"
        assert len(inputs.canvas.open_positions), "a finished text asks nothing"
        deepest = max(
            (depth - (node >= inputs.num_draft_tokens) for node, depth in enumerate(inputs.depths)), default=-1
        )
        assert deepest < len(inputs.canvas.open_positions) - 1, (
            "the distribution after the last node, or of a query, is for a hole"
        )
        assert inputs.draft_distributions is None or len(inputs.draft_distributions) == inputs.num_draft_tokens
        if inputs.draft_distributions is None or not any(inputs.draft_distributions):
            edges = list(zip(inputs.parents, nodes, strict=False))
            assert len(edges) == len(set(edges)), "no node is asked twice"
        if not self.allows_rewrites:
            assert np.array_equal(kv_cache.decided, decided[: len(kv_cache.decided)]), "decided text never changes"


def toy_network(vocab: int = 6, logit_scale: float = 2.0, seed: int = 0) -> ToyNetwork:
    """A random toy; `logit_scale` is the standard deviation of its logits: 0 is uniform, 10 nearly certain."""
    return ToyNetwork(torch.from_numpy(np.random.default_rng(seed).normal(size=(vocab,) * 3) * logit_scale))


def toy_drafter(
    target: ToyNetwork, error: float = 0.5, seed: int = 1, name: str = "small_model", sampling: Sampling | None = None
) -> ToyNetwork:
    """A draft model with the toy's logits up to an error, which can use uniforms."""
    noise = torch.from_numpy(np.random.default_rng(seed).normal(size=tuple(target.logits.shape)) * error)
    made = ToyNetwork(target.logits + noise, name=name, allows_rewrites=True)
    made.adapter = perfect_adapter(
        made, replace(sampling or Sampling(), repetition_penalty=1.0, banned=(), forced_at_index=())
    )
    return made


def perfect_adapter(target: ToyNetwork, sampling: Sampling, form: UniformConditioning = "one-hot") -> ToyAdapter:
    """A perfect adapter: it computes the tokens before its own from the uniforms.

    Given its own uniform, too (O-PTP), it is certain of its token; else its distribution is the target's (Theorem 2).
    Without uniforms (`independent` prediction, or a coupling that has none) it is the marginal.
    """

    marginals: dict[tuple[tuple[int, int], int], Tensor] = {}
    following = cache(lambda *pair: token_distribution(target.logits[pair], sampling))
    chances = cache(lambda *pair: probabilities(following(*pair), target.logits.shape[0]))

    def adapted(before: tuple[int, int], uniforms: Sequence[float]) -> Tensor:
        uninformed = math.isnan(uniforms[-1]) and (form == "one-hot" or len(uniforms) > 1)
        if form == "independent" or (uninformed and not sampling.greedy):
            key = before, len(uniforms)
            if key not in marginals:
                marginals[key] = torch.from_numpy(_marginal(chances, *key)).log()
            return marginals[key]
        uniforms = [0.0 if sampling.greedy else u for u in uniforms]  # greedy picks need none
        known, own = (uniforms[:-1], uniforms[-1]) if form == "one-hot" else (uniforms[1:], None)
        pair = before
        for u in known:
            pair = pair[1], pick(u, following(*pair))
        if own is None:
            return target.logits[pair]
        certain = torch.full(target.logits.shape[:1], -40.0, dtype=target.logits.dtype)
        certain[pick(own, following(*pair))] = 40.0
        return certain

    return adapted


def _marginal(chances: Callable[[int, int], np.ndarray], before: tuple[int, int], ahead: int) -> np.ndarray:
    """The marginal distribution of the token some positions ahead, from the chances of each token after two others."""
    pairs = {before: 1.0}
    for _ in range(ahead):
        grown: dict[tuple[int, int], float] = {}
        for pair, weight in pairs.items():
            for token, chance in enumerate(chances(*pair)):
                grown[pair[1], token] = grown.get((pair[1], token), 0.0) + weight * chance
        pairs = grown
    return np.bincount([token for _, token in pairs], list(pairs.values()), len(chances(*before)))


def random_adapter(target: ToyNetwork, seed: int = 0) -> ToyAdapter:
    """An untrained adapter."""
    dice = np.random.default_rng(seed)
    return lambda before, uniforms: torch.from_numpy(dice.normal(size=target.logits.shape[0]))


@dataclass
class ToyDecoding:
    """One text decoded with toys."""

    sequence: SequenceState
    networks: dict[str, ToyNetwork]
    steps: list[Step]

    @property
    def tokens(self) -> list[int]:
        """The decided tokens, of all steps."""
        return [int(token) for step in self.steps for token in step.tokens]

    def run(self) -> ToyDecoding:
        """Decode the text alone."""
        for _ in run_batch([self.sequence], self.networks):
            pass
        return self


def toy_decoding(
    method: str,
    prompt: Sequence[int],
    length: int,
    *,
    target: ToyNetwork,
    seed: int = 0,
    sampling: Sampling | None = None,
    rule: Rule = match,
    controller: Controller | None = None,
    stop: StopCondition | None = None,
    error: float = 0.5,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    extra_networks: Mapping[str, Any] | None = None,
) -> ToyDecoding:
    """A text to be decoded by `method`; draft models are derived from the target, or given by `extra_networks`.

    `error` is the standard deviation of the difference between their logits and the target's.
    """
    noise, sampling, steps = Noise(seed), sampling or Sampling(), []
    methods = make_methods(method, options)
    own = [name for one in methods for name in one.draft_models]
    students = {name: toy_drafter(target, error, name=name, sampling=sampling) for name in own}
    networks = {"target": target} | students | dict(extra_networks or {})
    if target.adapter is None and any(getattr(one, "any_subset", False) for one in methods):
        target.adapter = lambda before, uniforms: target.logits[before]  # cheap, and right now and then
    drafters = [drafter for one in methods if (drafter := one.drafter(noise, sampling, rule)) is not None]
    canvas = continuation(prompt, length)
    generator = speculate(canvas, noise, sampling, drafters, steps.append, rule, controller, stop)
    return ToyDecoding(SequenceState(generator), networks, steps)


def text_probabilities(
    target: ToyNetwork, prompt: Sequence[int], length: int, sampling: Sampling
) -> Float[np.ndarray, "texts"]:
    """The probability of every text of `length` tokens, the last token changing fastest."""
    vocab, texts = target.logits.shape[0], [([*prompt], 1.0)]
    for index in range(length):
        grown = []
        for text, weight in texts:
            pair = target._last_two(text)
            following = probabilities(token_distribution(target.logits[pair], sampling, np.array(text), index), vocab)
            grown += [([*text, token], weight * following[token]) for token in range(vocab)]
        texts = grown
    return np.array([weight for _, weight in texts])


def recording_noise(used: list[tuple[str, int]]) -> type[Noise]:
    """A noise that records the requested uniforms: streams and positions."""

    class Recording(Noise):
        def uniforms(self, stream, positions):
            used.extend((stream, int(position)) for position in np.atleast_1d(positions))
            return super().uniforms(stream, positions)

        def uniform(self, stream, position):
            used.append((stream, int(position)))
            return super().uniform(stream, position)

    return Recording
