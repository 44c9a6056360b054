"""Run heads as a draft network: token by token within a window, or a window drawn at once (MtPC, Alg. 1)."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.core.picking import Distribution
from saltus.core.sampling import float_row
from saltus.methods.mtpc.circuit_predictions import TINY, CircuitPredictions, StateDistributions
from saltus.methods.mtpc.circuits import CircuitFilter
from saltus.methods.mtpc.drawn_window import DrawnWindow, WindowOutputs
from saltus.methods.mtpc.gpu_heads import GraphedHeads
from saltus.methods.mtpc.heads import HeadModel, HeadOutputs
from saltus.methods.mtpc.window_sampling import LEAST, draw_window
from saltus.methods.shared.context_layers import ContextLayers
from saltus.methods.shared.context_rows import ContextKVCache, select_hidden_states
from saltus.methods.shared.draft_tree import DraftOutputs
from saltus.methods.shared.row_candidates import row_candidates
from saltus.methods.shared.timed_outputs import running_on

NO_LOGITS = np.empty(0, dtype=np.int64), np.empty((0, 0), dtype=np.float32)
SMALLEST = np.nextafter(np.float32(0), np.float32(1))  # in place of 0, which has no logarithm
MAX_CANDIDATE_TOKENS = 1024  # a position drafts its most likely tokens only, so that a state's softmax is small


@dataclass
class WindowCache:
    """The heads' outputs for the current window of a text, and the window's tokens so far.

    In NumPy: for one text the overhead of torch would exceed the computation.
    """

    context_kv_cache: ContextKVCache | None  # of the adapted layers
    num_decided: int = 0  # decided tokens when the window began
    outputs: HeadOutputs | None = None  # in the memory of the host
    distributions: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # by position
    window_tokens: list[int] = field(default_factory=list)  # observed so far
    circuit_filter: CircuitFilter[np.ndarray] | None = None


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
        self.has_own_logits = self.model.untied_unembedding is not None
        upper = self.model.upper
        self.context_layers = None if upper is None else ContextLayers(upper.merged(), by_gpu_kernels=True)
        self.run_heads = GraphedHeads(self.model) if self.device.type == "cuda" else self.model.draft_outputs
        with torch.inference_mode():
            self.direction_logits = _float_array(self.model.direction_logits())

    def new_kv_cache(self) -> WindowCache:
        return WindowCache(None if self.context_layers is None else self.context_layers.new_kv_cache())

    @torch.inference_mode()
    def forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[WindowCache]) -> list[ForwardOutputs]:
        """Logits over the drafted tokens for the window's next position, given the window's tokens."""
        started = time.perf_counter()
        with running_on(self.device):
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
        shape, outputs = self.model.shape, kv_cache.outputs
        assert outputs is not None and kv_cache.num_decided == len(inputs.canvas.decided_prefix)
        first = int(not shape.embeds_last_token)
        positions = self._likely_by_state(outputs, first + min(len(inputs.query_nodes), shape.num_draft_tokens))
        root = CircuitFilter(shape.circuit_structure, *map(_float_array, (outputs.initial, outputs.transitions)))
        if first:
            root.observe(positions[0].evidence(int(inputs.canvas.decided_prefix[-1])))
        return CircuitPredictions(positions[first:], root)

    def _likely_by_state(self, outputs: HeadOutputs, count: int) -> list[StateDistributions]:
        """The likely tokens of the first positions: those of the logits that the states share, where they share any."""
        candidates = None if self.has_own_logits else row_candidates(outputs.logits[:count, 0])
        directions, codes = self.direction_logits, _float_array(outputs.codes)
        positions = []
        for position in range(count):
            tokens, rest, kept = self.tokens, 0.0, directions
            if candidates is None:
                logits = _float_array(outputs.logits[position])
            else:
                likely = candidates[position]
                tokens, rest, logits = self.tokens[likely.columns], likely.rest, likely.logits[None]
                kept = None if directions is None else directions[:, likely.columns]
            if kept is not None:
                logits = logits + codes[position] @ kept
            greatest = logits.max(-1, keepdims=True, initial=0.0)
            total = np.exp(logits - greatest).sum(-1, keepdims=True) + rest * np.exp(-greatest)
            positions.append(StateDistributions(tokens, logits - greatest - np.log(np.maximum(total, TINY))))
        return positions

    def _draw_window(self, inputs: ForwardInputs, kv_cache: WindowCache) -> DrawnWindow:
        """A token for each uniform query, as far as the window goes, drawn from the joint distribution at once.

        The text's last token is an input of the heads, or else the window's first token, and evidence.
        """
        shape, outputs = self.model.shape, kv_cache.outputs
        assert outputs is not None and kv_cache.num_decided == len(inputs.canvas.decided_prefix)
        first = int(not shape.embeds_last_token)
        uniforms = torch.tensor(inputs.uniforms[: shape.num_draft_tokens], dtype=torch.float64)
        tokens, logits = self._likely_logits(outputs, first + len(uniforms))
        of_states = (logits / inputs.temperature).softmax(-1).double()
        of_states = of_states / of_states.sum(-1, keepdim=True)
        known = [_evidence(tokens[0], of_states[0], int(inputs.canvas.decided_prefix[-1]))] if first else []
        initial, transitions = outputs.initial.double(), outputs.transitions.double()
        columns, distributions = draw_window(
            shape.circuit_structure, initial, transitions, of_states[first:], known, uniforms
        )
        ids, weights = tokens[first:].numpy(), distributions.numpy()
        drawn = ids[np.arange(len(ids)), columns.numpy()].tolist()
        return DrawnWindow(drawn, [Distribution(*pair) for pair in zip(ids, weights, strict=True)])

    def _likely_logits(
        self, outputs: HeadOutputs, count: int
    ) -> tuple[Int[Tensor, "count likely"], Float[Tensor, "count rank likely"]]:
        """The most likely tokens of the first positions, ascending, and their logits in each state."""
        tokens, logits = torch.from_numpy(self.tokens).expand(count, -1), outputs.logits[:count].float()
        if self.direction_logits is None or outputs.codes is None:
            return tokens, logits
        directions, codes, shared = torch.from_numpy(self.direction_logits), outputs.codes[:count], logits[:, 0]
        if shared.shape[-1] <= MAX_CANDIDATE_TOKENS:
            return tokens, self.model.state_logits(shared, codes, directions)
        likely = np.argpartition(-shared.numpy(), MAX_CANDIDATE_TOKENS)[:, :MAX_CANDIDATE_TOKENS]
        chosen = torch.from_numpy(np.sort(likely))  # topk of torch takes five times as long
        differences = codes.to(directions.dtype) @ directions[:, chosen].transpose(0, 1)
        return tokens.gather(-1, chosen), shared.gather(-1, chosen)[:, None] + differences

    def _next_token_logits(
        self, decided: np.ndarray, kv_cache: WindowCache
    ) -> tuple[Int[np.ndarray, "likely"], Float[np.ndarray, "rows likely"]]:
        shape = self.model.shape
        assert kv_cache.outputs is not None
        window = decided[kv_cache.num_decided - (not shape.embeds_last_token) :].tolist()
        if kv_cache.circuit_filter is None or window[: len(kv_cache.window_tokens)] != kv_cache.window_tokens:
            weights = map(_float_array, (kv_cache.outputs.initial, kv_cache.outputs.transitions))
            kv_cache.circuit_filter, kv_cache.window_tokens = CircuitFilter(shape.circuit_structure, *weights), []
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
        cache = kv_cache.context_kv_cache
        if self.context_layers is None or cache is None:
            return hidden_states[-1, -self.model.shape.hidden :]
        begin = len(decided) - len(hidden_states)
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
        last = torch.tensor([int(decided[-1]) for decided, *_ in starting])
        outputs = self.run_heads(states, last)
        for number, (decided, _, kv_cache) in enumerate(starting):
            kv_cache.outputs, kv_cache.num_decided = outputs.of_text(number), len(decided)
            kv_cache.circuit_filter, kv_cache.window_tokens, kv_cache.distributions = None, [], {}

    def _state_distributions(
        self, kv_cache: WindowCache, position: int
    ) -> tuple[Int[np.ndarray, "likely"], Float[np.ndarray, "rank likely"]]:
        """The most likely tokens of a position, ascending, and their probabilities in each state.

        The position's shared logits select the tokens, so that states cost little; probabilities are over these alone.
        """
        if position not in kv_cache.distributions:
            assert kv_cache.outputs is not None
            tokens, logits = self._logits(kv_cache.outputs, position)
            distribution = np.exp(logits - logits.max(-1, keepdims=True))
            kv_cache.distributions[position] = tokens, distribution / distribution.sum(-1, keepdims=True)
        return kv_cache.distributions[position]

    def _logits(
        self, outputs: HeadOutputs, position: int
    ) -> tuple[Int[np.ndarray, "likely"], Float[np.ndarray, "rank likely"]]:
        tokens, directions, logits = self.tokens, self.direction_logits, _float_array(outputs.logits[position])
        if directions is None:
            return tokens, logits
        if logits.shape[-1] > MAX_CANDIDATE_TOKENS:
            chosen = np.sort(np.argpartition(-logits[0], MAX_CANDIDATE_TOKENS)[:MAX_CANDIDATE_TOKENS])
            tokens, logits, directions = tokens[chosen], logits[:, chosen], directions[:, chosen]
        return tokens, logits + _float_array(outputs.codes)[position] @ directions

    def _observe_token(self, kv_cache: WindowCache, circuit_filter: CircuitFilter[np.ndarray], token: int) -> None:
        """Condition on the window's next token; a token outside the distribution is no evidence."""
        tokens, distribution = self._state_distributions(kv_cache, len(kv_cache.window_tokens))
        column = int(np.searchsorted(tokens, token))
        known = column < len(tokens) and int(tokens[column]) == token
        evidence = np.log(np.maximum(distribution[:, column], SMALLEST)) if known else np.zeros_like(distribution[:, 0])
        circuit_filter.observe(evidence)
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
