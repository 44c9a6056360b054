"""Evaluate trees on any causal language model of Transformers: many texts, one call, nothing read twice."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from saltus.core.canvas import Canvas
from saltus.core.forward import NO_TOKEN, ForwardInputs, ForwardOutputs
from saltus.networks.adapters.gated_lora import Adapter, Gate, gated_adapter
from saltus.networks.kv_cache.kv_cache import KVCache
from saltus.networks.models.exact import attention, native
from saltus.networks.models.exact.attention import AttentionCall, SequenceRows
from saltus.networks.models.exact.batch_invariant_ops import BatchInvariantMode
from saltus.networks.models.exact.fixed_shapes import BASE_ROWS_PER_CALL, FixedShapeRunner, why_not_fixed_shapes
from saltus.networks.models.native_decoder import NativeDecoder, supports_native_decoder

log = logging.getLogger("saltus")

MAX_ROWS_PER_CALL = 256  # rows of one call at most, so that a long prompt needs little room
PLACEHOLDER_TOKEN = 0  # token id of an auxiliary query's row, whose embedding another takes the place of


@dataclass
class _Chunk:
    """What one text adds to a call: rows that read decided tokens, then, in its last one, the tree."""

    sequence: int
    tokens: list[int]
    rows: SequenceRows
    num_logits: int  # how many of its last rows are asked for logits
    output_hidden_states: bool  # are the features of all its rows wanted?
    uniforms: tuple[float, ...] = ()  # of its last rows, which are auxiliary queries
    has_token: tuple[bool, ...] = ()  # which of these have tokens
    temperature: float = 0.0


@dataclass
class CausalNetwork:
    """A causal model behind Forward and Reply. `free` gives up equal rounding for the library's own attention.

    An adapter, once attached, acts on the rows of auxiliary queries and on no others.
    On CUDA equal rounding comes from fixed shapes, elsewhere from kernels (`shaped` says otherwise, for tests).
    `width` is then the rows of a decoding call, and the depth of a tree at most. `taps` counts layers: the states
    after so many are put before the last ones, where features are asked for.
    """

    model: Any
    free_shapes: bool = False
    rows_per_call: int = BASE_ROWS_PER_CALL
    fixed_shapes: bool | None = None
    hidden_state_layers: tuple[int, ...] = ()
    num_layers: int = field(init=False)
    native_decoder: NativeDecoder | None = field(
        init=False, default=None
    )  # a quicker way through the same model, where there is one
    fixed_shape_runner: FixedShapeRunner | None = field(init=False, default=None)
    adapter: Adapter | None = field(init=False, default=None)
    lock: threading.Lock = field(init=False, default_factory=threading.Lock)  # a model serves one call at a time
    device: torch.device = field(init=False)  # a model looks through its weights for it, each time

    def __post_init__(self) -> None:
        self.device = self.model.device
        attention.install_attention(self.model)
        shaped = not self.free_shapes and (
            self.device.type == "cuda" if self.fixed_shapes is None else self.fixed_shapes
        )
        if shaped and (why := why_not_fixed_shapes(self.model)):
            log.warning("%s: calls round as their shapes have it, and texts may differ by that", why)
            self.free_shapes, shaped = True, False
        if not self.free_shapes:  # experts as linear layers, which Exact sees; grouped products round by their shapes
            self.model.set_experts_implementation("eager")
        self.model.eval()
        self.num_layers = self.model.config.get_text_config().num_hidden_layers
        if shaped:
            graphs = self.device.type == "cuda"
            self.fixed_shape_runner = FixedShapeRunner(
                self._evaluate, self.num_layers, self.device, self.rows_per_call, use_cuda_graphs=graphs
            )
        elif not self.free_shapes and supports_native_decoder(self.model):
            self.native_decoder = NativeDecoder(self.model, self.max_rows_per_call)

    any_subset = False  # does it fill holes that have text behind them?

    @property
    def max_rows_per_call(self) -> int:
        """Of one call, at most."""
        return MAX_ROWS_PER_CALL

    @staticmethod
    def context_tokens(canvas: Canvas) -> np.ndarray:
        """The decided tokens that it reads, in the order in which it reads them."""
        return canvas.decided_prefix

    def new_kv_cache(self) -> Any:
        """What is kept of one text between calls."""
        return KVCache() if self.fixed_shape_runner is None else self.fixed_shape_runner.new_kv_cache()

    def attach_adapter(self, adapter: Adapter | None) -> None:
        """Serve auxiliary queries by this adapter, as its weights are now. Errors: ValueError if it does not fit."""
        if adapter is not None:
            adapter.check_fits(self.model)
        with self.lock:
            self.adapter = adapter
            if self.native_decoder is not None:
                self.native_decoder.attach_adapter(adapter)

    @torch.inference_mode()
    def forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[Any]) -> list[ForwardOutputs]:
        """Evaluate every Forward, each on its own memory, in as few calls as ROWS or fixed shapes allow."""
        if any(inputs.query_nodes for inputs in batch):
            self._check_queries_supported()
        with self.lock:
            if self.fixed_shape_runner is None:
                return self._forward(batch, kv_caches)
            with native.kernel_threads_only() if self.device.type == "cpu" else torch.cuda.device(self.device):
                return [
                    self.fixed_shape_runner.forward(inputs, kv_cache)
                    for inputs, kv_cache in zip(batch, kv_caches, strict=True)
                ]

    def _check_queries_supported(self) -> None:
        if self.fixed_shape_runner is not None:
            raise ValueError(
                "auxiliary queries are not served by fixed shapes (CUDA) yet;"
                " load the model with device='cpu' or exact=False, or draft with another method"
            )
        if self.adapter is None:
            raise ValueError("auxiliary queries need an adapter that was trained for this model; attach one")

    def _forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[KVCache]) -> list[ForwardOutputs]:
        started = time.perf_counter()
        logits: list[Any] = [None] * len(batch)
        features: list[list[Any]] = [[] for _ in batch]
        read = [len(self.context_tokens(inputs.canvas)) for inputs in batch]
        queue: list[list[_Chunk]] = []
        for text, (inputs, kv_cache) in enumerate(zip(batch, kv_caches, strict=True)):
            past = self._reuse_kv_cache(kv_cache, inputs)
            read[text] -= past
            queue.append(list(self._chunks(text, inputs, kv_cache, past)))
        with contextlib.nullcontext() if self.free_shapes else native.kernel_threads_only():
            while any(queue):
                reads, room = [], self.max_rows_per_call
                for waiting in queue:
                    if waiting and waiting[0].rows.num_rows <= room:
                        reads.append(waiting.pop(0))
                        room -= reads[-1].rows.num_rows
                rows, hidden = self._run_model(reads)
                for one in reads:
                    if one.num_logits:
                        logits[one.sequence], rows = rows[: one.num_logits], rows[one.num_logits :]
                    if one.output_hidden_states:
                        features[one.sequence].append(hidden[: one.rows.num_rows])
                    hidden = hidden[one.rows.num_rows :]
        for inputs, kv_cache in zip(batch, kv_caches, strict=True):
            kv_cache.tokens = self.context_tokens(inputs.canvas).copy()
            kv_cache.pending_tree = inputs if inputs.tokens else None
        if self.device.type == "cuda":  # so that seconds are those of the call
            torch.cuda.current_stream(self.device).synchronize()
        seconds = time.perf_counter() - started
        rows = sum(read) + sum(len(inputs.tokens) for inputs in batch)
        return [
            ForwardOutputs(
                logits[i], torch.cat(features[i]) if inputs.output_hidden_states else None, seconds, read[i], rows
            )
            for i, inputs in enumerate(batch)
        ]

    def _reuse_kv_cache(self, kv_cache: KVCache, inputs: ForwardInputs) -> int:
        """How many of the tokens that it would read stand in the memory."""
        return kv_cache.reuse_prefix(inputs.canvas.decided_prefix)

    def _chunks(self, sequence: int, inputs: ForwardInputs, kv_cache: KVCache, past_length: int) -> Iterator[_Chunk]:
        """What a text must read, in calls."""
        return _prefill_and_tree_chunks(sequence, inputs, kv_cache, past_length)

    def _evaluate(
        self, tokens: torch.Tensor, positions: torch.Tensor, num_logits: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and features of the last rows (0: of all); tokens and positions are [1, rows]."""
        exact = BatchInvariantMode() if tokens.device.type == "cpu" else contextlib.nullcontext()
        with self._capture_hidden_states() as heard, exact:
            out = self.model(input_ids=tokens, position_ids=positions, logits_to_keep=num_logits, use_cache=False)
        features = heard()
        return out.logits[0], features[-num_logits:] if num_logits else features

    def _run_model(self, chunks: Sequence[_Chunk]) -> tuple[torch.Tensor, torch.Tensor]:
        """One call of the model: logits of the wanted rows; features of all rows, where any are wanted."""
        tokens = [token for read in chunks for token in read.tokens]
        positions = np.concatenate([read.rows.positions for read in chunks])
        wanted, end = [], 0
        for read in chunks:
            end += len(read.tokens)
            wanted += range(end - read.num_logits, end)
        call = AttentionCall([read.rows for read in chunks], self.num_layers, self.free_shapes)
        gate = self._gate(chunks)
        features = any(read.output_hidden_states for read in chunks)
        device = self.device
        if self.native_decoder is not None:
            rows = torch.tensor(wanted, dtype=torch.long)
            return self.native_decoder(
                torch.tensor(tokens), torch.from_numpy(positions), call, rows, features, gate, self.hidden_state_layers
            )
        exact = contextlib.nullcontext() if self.free_shapes else BatchInvariantMode()
        gated = gated_adapter(self.model, self.adapter, gate) if gate and self.adapter else contextlib.nullcontext()
        with attention.attention_context(call), self._capture_hidden_states() as heard, exact, gated:
            out = self.model(
                input_ids=torch.tensor([tokens], device=device),
                position_ids=torch.from_numpy(positions[None]).to(device),
                logits_to_keep=torch.tensor(wanted, dtype=torch.long, device=device),
                use_cache=False,
            )
        return out.logits[0], heard()

    def _gate(self, chunks: Sequence[_Chunk]) -> Gate | None:
        """Which rows of a call are auxiliary queries, and what they are told."""
        if not any(read.uniforms for read in chunks):
            return None
        rows, uniforms, temperatures, guesses, end = [], [], [], [], 0
        for read in chunks:
            end += len(read.tokens)
            rows += range(end - len(read.uniforms), end)
            uniforms += read.uniforms
            temperatures += [read.temperature] * len(read.uniforms)
            guesses += read.has_token
        device = self.device
        places, own = torch.tensor(rows, dtype=torch.long, device=device), torch.tensor(guesses, device=device)
        conditioning, warm = (torch.tensor(x, dtype=torch.float64, device=device) for x in (uniforms, temperatures))
        return Gate(places, conditioning, warm, own)

    def add_hidden_state_layers(self, layers: Sequence[int]) -> None:
        """Add layers whose states are features, while no text is being written. Errors: ValueError: no such layers."""
        if any(not 0 < tap < self.num_layers for tap in layers):
            raise ValueError(f"features are wanted after {max(layers)} layers, but the model has {self.num_layers}")
        with self.lock:
            if self.fixed_shape_runner is not None and not set(layers) <= set(self.hidden_state_layers):
                self.fixed_shape_runner.free_kv_buffers.clear()  # their graphs return fewer hidden states
            self.hidden_state_layers = tuple(sorted({*self.hidden_state_layers, *layers}))

    def _capture_hidden_states(self) -> _HiddenStateCapture:
        return _HiddenStateCapture(self.model.get_decoder(), self.hidden_state_layers)


class _HiddenStateCapture:
    """Hear the states that a decoder's layers give out while the context is open: those tapped, and the last."""

    def __init__(self, decoder: torch.nn.Module, layers: Sequence[int]) -> None:
        self.decoder, self.layers = decoder, layers
        self.hidden_states: list[torch.Tensor] = []

    def __enter__(self) -> Callable[[], torch.Tensor]:
        layers = _decoder_layers(self.decoder) if self.layers else ()
        self.hooks = [layers[tap - 1].register_forward_hook(self._record) for tap in self.layers]
        self.hooks.append(self.decoder.register_forward_hook(self._record))
        return lambda: torch.cat(self.hidden_states, -1)[0] if self.layers else self.hidden_states[0][0]

    def _record(self, module: Any, inputs: Any, out: Any) -> None:
        out = getattr(out, "last_hidden_state", out)
        self.hidden_states.append(out[0] if isinstance(out, tuple) else out)

    def __exit__(self, *_) -> None:
        for hook in self.hooks:
            hook.remove()


def _decoder_layers(decoder: torch.nn.Module) -> torch.nn.ModuleList:
    """The decoder's layers, whatever its authors call them."""
    lists = [module for module in decoder.children() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len)


def _prefill_and_tree_chunks(
    sequence: int, inputs: ForwardInputs, kv_cache: KVCache, past_length: int
) -> Iterator[_Chunk]:
    """Cut what a text must read into calls: decided tokens ROWS at a time, the tree with the last of them."""
    decided, nodes = inputs.canvas.decided_prefix, len(inputs.tokens)
    assert nodes < MAX_ROWS_PER_CALL
    while (unread := len(decided) - past_length) + nodes > MAX_ROWS_PER_CALL:
        count = min(MAX_ROWS_PER_CALL, unread - 1)
        yield _Chunk(
            sequence,
            decided[past_length : past_length + count].tolist(),
            _sequence_rows(kv_cache, past_length, count, inputs, tree=False),
            0,
            inputs.output_hidden_states,
        )
        past_length += count
    tokens = decided[past_length:].tolist() + [
        token if token != NO_TOKEN else PLACEHOLDER_TOKEN for token in inputs.tokens
    ]
    guesses = tuple(inputs.kinds[query].has_token for query in inputs.query_nodes)
    part = _sequence_rows(kv_cache, past_length, unread, inputs, tree=True)
    yield _Chunk(
        sequence, tokens, part, nodes + 1, inputs.output_hidden_states, inputs.uniforms, guesses, inputs.temperature
    )


def _sequence_rows(
    kv_cache: KVCache, past_length: int, num_new_tokens: int, inputs: ForwardInputs, tree: bool
) -> SequenceRows:
    nodes = len(inputs.tokens) if tree else 0
    visible = np.zeros((num_new_tokens + nodes, num_new_tokens + nodes), dtype=np.uint8)
    visible[:num_new_tokens, :num_new_tokens] = np.tri(num_new_tokens, dtype=np.uint8)
    for node in range(nodes):
        row = num_new_tokens + node
        visible[row] = visible[
            inputs.parents[node] + num_new_tokens
        ]  # parent −1 is the last decided token, one row before
        visible[row, row] = 1
    positions = np.arange(past_length, past_length + num_new_tokens + nodes)
    if nodes:
        positions[num_new_tokens:] = past_length + num_new_tokens + np.array(inputs.depths)
    return SequenceRows(kv_cache, past_length, positions, visible)
