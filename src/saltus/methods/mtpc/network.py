"""Run heads as a draft network: token by token within a window, or a window drawn at once (MtPC, Alg. 1)."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.core.picking import Distribution
from saltus.core.sampling import float_row
from saltus.kernels import native
from saltus.methods.mtpc.circuit_predictions import TINY, CircuitPredictions, StateDistributions
from saltus.methods.mtpc.circuits import CircuitFilter
from saltus.methods.mtpc.drawn_window import DrawnWindow, WindowOutputs
from saltus.methods.mtpc.heads import CircuitParameters, HeadModel
from saltus.methods.mtpc.window_sampling import LEAST, draw_window
from saltus.methods.shared.context_layers import ContextLayers
from saltus.methods.shared.context_rows import ContextKVCache, select_hidden_states
from saltus.methods.shared.draft_tree import DraftOutputs
from saltus.methods.shared.row_candidates import row_candidates

NO_LOGITS = np.empty(0, dtype=np.int64), np.empty((0, 0), dtype=np.float32)
MAX_CANDIDATE_TOKENS = 1024  # a position drafts its most likely tokens only, so that a state's softmax is small


@dataclass
class WindowCache:
    """The heads' outputs for the current window of a text, and the window's tokens so far.

    In NumPy: for one text the overhead of torch would exceed the computation.
    """

    num_decided: int = 0  # decided tokens when the window began
    parameters: CircuitParameters | None = None
    initial: np.ndarray = field(default_factory=lambda: np.empty(0))
    transitions: np.ndarray = field(default_factory=lambda: np.empty(0))
    shared_logits: Tensor | None = None  # [window, draft] logits, if states share any
    state_codes: np.ndarray | None = None  # [window, rank, subspace_dim]
    distributions: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # by position
    window_tokens: list[int] = field(default_factory=list)  # observed so far
    circuit_filter: CircuitFilter[np.ndarray] | None = None
    context_kv_cache: ContextKVCache = field(default_factory=ContextKVCache)  # of the adapted layers


@dataclass
class HeadNetwork:
    """Heads as a network: a forward pass with hidden states starts a window of draft positions.

    Later passes without hidden states, whose text continues with draft tokens, stay in that window. Behind its end
    there are no logits.
    """

    model: HeadModel
    target: Any  # the network whose hidden states it reads

    def __post_init__(self) -> None:
        self.device = self.model.tokens.device
        self.tokens = self.model.tokens.cpu().numpy()
        upper = self.model.upper
        self.context_layers = None if upper is None else ContextLayers(upper.merged())
        with torch.inference_mode():
            self.direction_logits = _float_array(self.model.direction_logits())

    def new_kv_cache(self) -> WindowCache:
        return WindowCache()

    @torch.inference_mode()
    def forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[WindowCache]) -> list[ForwardOutputs]:
        """Logits over the drafted tokens for the window's next position, given the window's tokens."""
        started = time.perf_counter()
        with native.kernel_threads_only() if self.device.type == "cpu" else nullcontext():
            self._start_windows(batch, kv_caches)
            outputs = [self._text_outputs(*pair) for pair in zip(batch, kv_caches, strict=True)]
        seconds = time.perf_counter() - started
        return [replace(each, seconds=seconds, num_rows=len(batch)) for each in outputs]

    def _text_outputs(self, inputs: ForwardInputs, kv_cache: WindowCache) -> ForwardOutputs:
        """Logits of the next token, or of a window with mask queries its predictions, with uniform queries a draw."""
        if not inputs.query_nodes:
            tokens, logits = self._next_token_logits(inputs.canvas.decided_prefix, kv_cache)
            return ForwardOutputs(torch.from_numpy(logits), token_ids=torch.from_numpy(tokens))
        tokens, logits = map(torch.from_numpy, NO_LOGITS)
        if inputs.uniforms and math.isnan(inputs.uniforms[0]):
            return DraftOutputs(logits, token_ids=tokens, predictions=self._predict_window(inputs, kv_cache))
        return WindowOutputs(logits, token_ids=tokens, window=self._draw_window(inputs, kv_cache))

    def _predict_window(self, inputs: ForwardInputs, kv_cache: WindowCache) -> CircuitPredictions:
        """The distributions of as many positions as there are mask queries, as far as the window goes."""
        shape, parameters = self.model.shape, kv_cache.parameters
        assert parameters is not None and kv_cache.num_decided == len(inputs.canvas.decided_prefix)
        first = int(not shape.embeds_last_token)
        count = first + min(len(inputs.query_nodes), shape.num_draft_tokens)
        positions = self._likely_by_state(kv_cache, parameters, count)
        root = CircuitFilter(shape.circuit_structure, kv_cache.initial, kv_cache.transitions)
        if first:
            root.observe(positions[0].evidence(int(inputs.canvas.decided_prefix[-1])))
        return CircuitPredictions(positions[first:], root)

    def _likely_by_state(
        self, kv_cache: WindowCache, parameters: CircuitParameters, count: int
    ) -> list[StateDistributions]:
        """The likely tokens of the first positions: those of the logits that the states share, where they share any."""
        shared = kv_cache.shared_logits
        candidates = None if shared is None else row_candidates(shared[:count])
        positions = []
        for position in range(count):
            if shared is None or candidates is None:
                tokens, rest = self.tokens, 0.0
                logits = _float_array(self.model.logits(parameters, position))
            else:
                likely = candidates[position]
                tokens, rest, logits = self.tokens[likely.columns], likely.rest, likely.logits[None]
                if self.direction_logits is not None and kv_cache.state_codes is not None:
                    logits = logits + kv_cache.state_codes[position] @ self.direction_logits[:, likely.columns]
            greatest = logits.max(-1, keepdims=True, initial=0.0)
            total = np.exp(logits - greatest).sum(-1, keepdims=True) + rest * np.exp(-greatest)
            positions.append(StateDistributions(tokens, logits - greatest - np.log(np.maximum(total, TINY))))
        return positions

    def _draw_window(self, inputs: ForwardInputs, kv_cache: WindowCache) -> DrawnWindow:
        """A token for each uniform query, as far as the window goes, drawn from the joint distribution at once.

        The text's last token is an input of the heads, or else the window's first token, and evidence.
        """
        shape, parameters = self.model.shape, kv_cache.parameters
        assert parameters is not None and kv_cache.num_decided == len(inputs.canvas.decided_prefix)
        first = int(not shape.embeds_last_token)
        uniforms = torch.tensor(inputs.uniforms[: shape.num_draft_tokens], dtype=torch.float64, device=self.device)
        tokens, logits = self._likely_logits(kv_cache, parameters, first + len(uniforms))
        of_states = (logits / inputs.temperature).softmax(-1).double()
        of_states = of_states / of_states.sum(-1, keepdim=True)
        known = [_evidence(tokens[0], of_states[0], int(inputs.canvas.decided_prefix[-1]))] if first else []
        initial, transitions = parameters.initial.double(), parameters.transitions.double()
        columns, distributions = draw_window(
            shape.circuit_structure, initial, transitions, of_states[first:], known, uniforms
        )
        ids, weights = tokens[first:].cpu().numpy(), distributions.cpu().numpy()
        drawn = ids[np.arange(len(ids)), columns.cpu().numpy()].tolist()
        return DrawnWindow(drawn, [Distribution(*pair) for pair in zip(ids, weights, strict=True)])

    def _likely_logits(
        self, kv_cache: WindowCache, parameters: CircuitParameters, count: int
    ) -> tuple[Int[Tensor, "count likely"], Float[Tensor, "count rank likely"]]:
        """The most likely tokens of the first positions, ascending, and their logits in each state."""
        model, codes = self.model, parameters.state_codes
        if kv_cache.shared_logits is None:
            logits = torch.stack([model.logits(parameters, position) for position in range(count)])
            return model.tokens.expand(count, -1), logits
        shared = kv_cache.shared_logits[:count].float()
        if self.direction_logits is None or codes is None:
            return model.tokens.expand(count, -1), shared[:, None]
        directions = torch.from_numpy(self.direction_logits).to(self.device)
        if shared.shape[-1] <= MAX_CANDIDATE_TOKENS:
            return model.tokens.expand(count, -1), model.state_logits(shared, codes[:count], directions)
        likely = np.argpartition(-shared.cpu().numpy(), MAX_CANDIDATE_TOKENS)[:, :MAX_CANDIDATE_TOKENS]
        chosen = torch.from_numpy(np.sort(likely)).to(self.device)  # topk of torch takes five times as long
        differences = codes[:count].to(directions.dtype) @ directions[:, chosen].transpose(0, 1)
        return model.tokens[chosen], shared.gather(-1, chosen)[:, None] + differences

    def _next_token_logits(
        self, decided: np.ndarray, kv_cache: WindowCache
    ) -> tuple[Int[np.ndarray, "likely"], Float[np.ndarray, "rows likely"]]:
        shape = self.model.shape
        assert kv_cache.parameters is not None
        window = decided[kv_cache.num_decided - (not shape.embeds_last_token) :].tolist()
        if kv_cache.circuit_filter is None or window[: len(kv_cache.window_tokens)] != kv_cache.window_tokens:
            circuit_filter = CircuitFilter(shape.circuit_structure, kv_cache.initial, kv_cache.transitions)
            kv_cache.circuit_filter, kv_cache.window_tokens = circuit_filter, []
        for token in window[len(kv_cache.window_tokens) : shape.window]:
            self._observe_token(kv_cache, kv_cache.circuit_filter, token)
        tokens, logits = self.tokens, np.empty((0, len(self.tokens)), dtype=np.float32)
        if len(window) < shape.window:
            tokens, distribution = self._state_distributions(kv_cache, len(window))
            with np.errstate(divide="ignore"):
                logits = np.log(np.exp(kv_cache.circuit_filter.state_log_weights) @ distribution)[None]
        return tokens, logits

    def _input_hidden_state(
        self, kv_cache: WindowCache, hidden_states: Tensor, decided: np.ndarray
    ) -> Float[Tensor, "hidden"]:
        """The target's hidden state before the last token, or the output of the adapted layers for it."""
        if self.context_layers is None:
            return hidden_states[-1, -self.model.shape.hidden :]
        begin, cache = len(decided) - len(hidden_states), kv_cache.context_kv_cache
        past = cache.reuse_prefix(decided, begin)
        layers = self.target.layers_of(hidden_states)
        inputs = select_hidden_states(hidden_states[past - begin :], layers, self.model.shape.hidden_state_layers)
        state = self.context_layers(inputs, cache, past - cache.first_position, 1, output_logits=False)[1][-1]
        cache.tokens = decided[cache.first_position :].copy()
        return state

    def _start_windows(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[WindowCache]) -> None:
        """One batched pass of the heads for all texts that start a window."""
        starting = [
            (inputs.canvas.decided_prefix, inputs.hidden_states, kv_cache)
            for inputs, kv_cache in zip(batch, kv_caches, strict=True)
            if inputs.hidden_states is not None
        ]
        if not starting:
            return
        states = torch.stack(
            [self._input_hidden_state(kv_cache, given, decided) for decided, given, kv_cache in starting]
        )
        last = torch.tensor([int(decided[-1]) for decided, *_ in starting], device=self.device)
        outputs = self.model(states, last)
        shared = None if self.model.shape.untied_unembedding else self.model.shared_logits(outputs.position_features)
        for number, (decided, _, kv_cache) in enumerate(starting):
            codes = None if outputs.state_codes is None else outputs.state_codes[number]
            parameters = CircuitParameters(
                outputs.initial[number], outputs.transitions[number], outputs.position_features[number], codes
            )
            kv_cache.initial, kv_cache.transitions = map(_float_array, (parameters.initial, parameters.transitions))
            kv_cache.state_codes = _float_array(codes)
            kv_cache.shared_logits = None if shared is None else shared[number]
            kv_cache.parameters, kv_cache.num_decided = parameters, len(decided)
            kv_cache.circuit_filter, kv_cache.window_tokens, kv_cache.distributions = None, [], {}

    def _state_distributions(
        self, kv_cache: WindowCache, position: int
    ) -> tuple[Int[np.ndarray, "likely"], Float[np.ndarray, "rank likely"]]:
        """The most likely tokens of a position, ascending, and their probabilities in each state.

        The position's shared logits select the tokens, so that states cost little; probabilities are over these alone.
        """
        if position not in kv_cache.distributions:
            tokens, logits = self._logits(kv_cache, position)
            distribution = np.exp(logits - logits.max(-1, keepdims=True))
            kv_cache.distributions[position] = tokens, distribution / distribution.sum(-1, keepdims=True)
        return kv_cache.distributions[position]

    def _logits(
        self, kv_cache: WindowCache, position: int
    ) -> tuple[Int[np.ndarray, "likely"], Float[np.ndarray, "rank likely"]]:
        tokens, directions = self.tokens, self.direction_logits
        if kv_cache.shared_logits is None:
            assert kv_cache.parameters is not None
            return tokens, _float_array(self.model.logits(kv_cache.parameters, position))
        shared = _float_array(kv_cache.shared_logits[position])
        if kv_cache.state_codes is None or directions is None:
            return tokens, shared[None]
        if len(shared) > MAX_CANDIDATE_TOKENS:
            chosen = np.sort(np.argpartition(-shared, MAX_CANDIDATE_TOKENS)[:MAX_CANDIDATE_TOKENS])
            tokens, shared, directions = tokens[chosen], shared[chosen], directions[:, chosen]
        return tokens, shared + kv_cache.state_codes[position] @ directions

    def _observe_token(self, kv_cache: WindowCache, circuit_filter: CircuitFilter[np.ndarray], token: int) -> None:
        """Condition on the window's next token; a token outside the distribution is no evidence."""
        tokens, distribution = self._state_distributions(kv_cache, len(kv_cache.window_tokens))
        column = int(np.searchsorted(tokens, token))
        known = column < len(tokens) and int(tokens[column]) == token
        with np.errstate(divide="ignore"):
            circuit_filter.observe(np.log(distribution[:, column]) if known else np.zeros_like(distribution[:, 0]))
        kv_cache.window_tokens.append(token)


def _evidence(
    tokens: Int[Tensor, "likely"], of_states: Float[Tensor, "rank likely"], token: int
) -> Float[Tensor, "rank"]:
    """The log-probability of a token in each state; 0 for a token outside the distribution, which is no evidence."""
    columns = (tokens == token).nonzero()
    return (
        of_states[:, int(columns[0, 0])].clamp_min(LEAST).log() if len(columns) else of_states.new_zeros(len(of_states))
    )


def _float_array(x: Tensor | None) -> Any:
    """A float32 array; None stays None."""
    return None if x is None else float_row(x)
