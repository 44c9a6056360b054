"""Evaluate trees of many texts in one call of a causal language model of Transformers, with a KV cache."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from saltus.core.canvas import Canvas
from saltus.core.forward import ForwardInputs, ForwardOutputs, QueryStart
from saltus.kernels import native
from saltus.kernels.batch_invariant_ops import BatchInvariantMode
from saltus.models.cpu import attention, chunked_prefill
from saltus.models.cpu.attention import AttentionCall
from saltus.models.cpu.chunked_prefill import (
    Chunk,
    chunks_by_call,
    gate_of_queries,
    prefill_and_tree_chunks,
    rows_of_call,
)
from saltus.models.cpu.hybrid_kv_cache import StateSizes
from saltus.models.cpu.kv_cache import KVCache
from saltus.models.cpu.native_decoder import NativeDecoder, supports_native_decoder
from saltus.models.cpu.prepared_call import MAX_ROWS as MAX_PREPARED_ROWS
from saltus.models.cpu.torch_decoder import TorchDecoder
from saltus.models.cuda.fixed_shape_calls import FixedShapeSettings
from saltus.models.cuda.fixed_shapes import FixedShapeRunner, why_not_fixed_shapes
from saltus.models.cuda.gpu_decoder import gpu_decoder_of
from saltus.models.cuda.gpu_experts import gpu_experts_implementation
from saltus.models.decoder_of import decoder_of
from saltus.models.gated_lora import Adapter, Gate, StaticGate, gated_adapter
from saltus.models.hidden_state_capture import HiddenStateCapture
from saltus.models.long_rope import LongRope, find_long_rope
from saltus.models.packed_decoder import PackedDecoder, transformers_model
from saltus.models.packed_experts import experts_implementation
from saltus.models.recurrent_layers import chooses_keys, recurrent_layer_types

log = logging.getLogger("saltus")


@dataclass
class CausalNetwork:
    """A causal model of Transformers as a target network.

    A batch is evaluated in one of three ways:

    - one text, without queries and with few rows, by the native decoder's prepared call (`cpu/prepared_call.py`);
    - on CUDA by calls of our kernels, or of fixed shapes (`cuda/fixed_shapes.py`);
    - else in chunks (`cpu/chunked_prefill.py`), by the native decoder or the layers of Transformers.

    A row rounds alike in every call, unless `batch_invariant` is False: then Transformers' own attention is used. An
    attached adapter acts on the rows of query nodes and on no others.
    """

    model: Any
    batch_invariant: bool = True
    fixed_shape_settings: FixedShapeSettings = field(default_factory=FixedShapeSettings)
    fixed_shapes: bool | None = None  # None: on CUDA; tests set it
    hidden_state_layers: tuple[int, ...] = ()  # states after so many layers are returned too, before the last states
    layers_by_count: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False)  # now and before, by number
    num_layers: int = field(init=False)
    hidden_size: int = field(init=False)
    kv_bytes_per_token: int | None = field(init=False, default=None)  # as measured; None: as the configuration says
    # faster than the model's own code, for models that it supports
    native_decoder: NativeDecoder | TorchDecoder | None = field(init=False, default=None)
    fixed_shape_runner: FixedShapeRunner | None = field(init=False, default=None)
    adapter: Adapter | None = field(init=False, default=None)
    long_rope: LongRope | None = field(init=False, default=None)
    lock: threading.Lock = field(init=False, default_factory=threading.Lock)  # a model serves one call at a time
    device: torch.device = field(init=False)  # `model.device` searches the parameters on every access
    any_subset = False
    accepts_drafters = True

    def __post_init__(self) -> None:
        self.device, config = self.model.device, self.model.config.get_text_config()
        self.num_layers, self.hidden_size = config.num_hidden_layers, config.hidden_size
        fixed = self.device.type == "cuda" if self.fixed_shapes is None else self.fixed_shapes
        if fixed and recurrent_layer_types(self.model):  # nothing but our kernels reads trees into states
            self.batch_invariant = True
        fixed = fixed and self.batch_invariant
        self._install_exact_layers(fixed)
        gpu_decoder = gpu_decoder_of(self.model) if fixed else None
        if fixed and gpu_decoder is None and (why := why_not_fixed_shapes(self.model)):
            log.warning("%s: rounding depends on the shapes of calls, and texts may differ by that", why)
            self.batch_invariant, fixed = False, False
        self.model.eval()
        self.long_rope = find_long_rope(self.model)
        if fixed:
            graphs = self.device.type == "cuda"
            self.fixed_shape_runner = FixedShapeRunner(
                self._run_fixed_shape, self.num_layers, self.device, self.fixed_shape_settings, graphs, gpu_decoder,
                self.hidden_state_layers,
            )  # fmt: skip
        elif supports_native_decoder(self.model):
            decoder = NativeDecoder(self.model, max(self.max_rows_per_call, 1 + chunked_prefill.MAX_NODES))
            # nothing else reads trees into states, or for layers that choose keys
            if self.batch_invariant or chooses_keys(self.model) or decoder.layers.states.state:
                self.native_decoder, self.batch_invariant = decoder, True

    def _install_exact_layers(self, fixed: bool) -> None:
        """Let Transformers' layers compute attention and experts by our functions, which round alike in every call."""
        if isinstance(self.model, PackedDecoder):
            return
        if not chooses_keys(self.model):  # such layers hide the other keys by masks of Transformers' attention
            attention.install_attention(self.model)
        if self.batch_invariant:  # Transformers' grouped products round by their shapes
            of_gpu = gpu_experts_implementation(self.model) if fixed else None
            self.model.set_experts_implementation(of_gpu or experts_implementation(self.model))

    @property
    def compute_path(self) -> Literal["native", "fixed shapes", "transformers", "torch"]:
        """See TargetNetwork."""
        runner = self.fixed_shape_runner
        if self.native_decoder is not None or (runner is not None and runner.decoder is not None):
            return "native"
        return "transformers" if self.fixed_shape_runner is None else "fixed shapes"

    @property
    def max_draft_tokens(self) -> int | None:
        """See TargetNetwork: in fixed shapes a tree and the last decided token are at most `max_tree_depth` deep."""
        return None if self.fixed_shape_runner is None else self.fixed_shape_settings.max_tree_depth - 1

    @property
    def max_rows_per_call(self) -> int:
        """The limit of rows in one call, unless a single tree has more."""
        return chunked_prefill.MAX_ROWS_PER_CALL

    @staticmethod
    def context_tokens(canvas: Canvas) -> np.ndarray:
        """The decided tokens in the order of the KV cache."""
        return canvas.decided_prefix

    @property
    def state_sizes(self) -> StateSizes | None:
        """What recurrent layers keep; None if there are none."""
        decoder, runner = self.native_decoder, self.fixed_shape_runner
        if runner is not None and runner.states is not None:
            return StateSizes(runner.states.slot_bytes, runner.states.node_bytes)
        return decoder.layers.states if isinstance(decoder, NativeDecoder) and decoder.layers.states.state else None

    def new_kv_cache(self) -> Any:
        """An empty KV cache for one text."""
        if isinstance(self.native_decoder, NativeDecoder):
            return self.native_decoder.new_kv_cache()
        return KVCache() if self.fixed_shape_runner is None else self.fixed_shape_runner.new_kv_cache()

    @property
    def keeps_keys_and_values(self) -> bool:
        """See KeepsKeysAndValues."""
        runner = self.fixed_shape_runner
        return self.state_sizes is None and (runner is None or runner.decoder is not None)

    def num_tokens_in_cache(self, kv_cache: Any, tokens: np.ndarray) -> int:
        """See KeepsKeysAndValues."""
        length = kv_cache.reuse_prefix(tokens)
        if self.fixed_shape_runner is not None:
            self.fixed_shape_runner.copy_accepted_nodes([kv_cache])
        return length

    @property
    def query_start(self) -> QueryStart:
        """Of the attached adapter."""
        return self.adapter.settings.query_start if self.adapter else "blank"

    def attach_adapter(self, adapter: Adapter | None) -> None:
        """Use this adapter, with its present weights, for query nodes. Errors: ValueError if it does not fit."""
        if adapter is not None:
            adapter.check_fits(self.model)
            runner = self.fixed_shape_runner
            if runner is not None and (kind := runner.keeps_what_adapters_cannot_read) is not None:
                raise ValueError(
                    f"on a GPU an adapter does not draft for a model that keeps {kind}; load it on the CPU"
                    " (--device cpu, device='cpu'), or take another method, such as lookup"
                )
        with self.lock:
            self.adapter = adapter
            if adapter is not None and self.fixed_shape_runner is not None and isinstance(self.model, PackedDecoder):
                attention.install_attention(transformers_model(self.model))  # which evaluates the queries
            if self.native_decoder is not None:
                self.native_decoder.attach_adapter(adapter)
            if self.fixed_shape_runner is not None:
                self.fixed_shape_runner.attach_adapter(adapter)

    def forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[Any]) -> list[ForwardOutputs]:
        """Evaluate each text on its own KV cache, in as few calls as the limit of rows or fixed shapes allow."""
        if len(batch) == 1:
            with self.lock:
                outputs = self._forward_prepared(batch[0], kv_caches[0])
            if outputs is not None:
                return [outputs]
        if any(inputs.query_nodes for inputs in batch):
            self._check_queries_supported()
        with self.lock, torch.inference_mode():
            if self.long_rope is None:
                return self._forward_batch(batch, kv_caches)
            return self._forward_by_angles(self.long_rope, batch, kv_caches)

    def _check_queries_supported(self) -> None:
        if self.adapter is None:
            raise ValueError("query nodes need an adapter that was trained for this model; attach one")

    def _forward_prepared(self, inputs: ForwardInputs, kv_cache: Any) -> ForwardOutputs | None:
        """The outputs of a text by a prepared call; None for one that is not prepared for."""
        decoder = self.native_decoder
        call = decoder.prepared_call if isinstance(decoder, NativeDecoder) else None
        if call is None or inputs.kinds:
            return None
        started = time.perf_counter()
        context, nodes = inputs.canvas.decided_prefix, len(inputs.tokens)
        past = self._reuse_kv_cache(kv_cache, inputs)
        unread = len(context) - past
        if unread + nodes > MAX_PREPARED_ROWS:
            return None
        native.share_threads()
        tokens = [*context[past:].tolist(), *inputs.tokens]
        states_wanted = inputs.output_hidden_states
        logits, states = call(kv_cache, past, tokens, inputs.parents, states_wanted, self.hidden_state_layers)
        kv_cache.tokens, kv_cache.pending_tree = context.copy(), inputs if nodes else None
        seconds = time.perf_counter() - started
        return ForwardOutputs(logits, states if states_wanted else None, seconds, unread, unread + nodes)

    def _forward_by_angles(
        self, long_rope: LongRope, batch: Sequence[ForwardInputs], kv_caches: Sequence[Any]
    ) -> list[ForwardOutputs]:
        """Texts whose angles are those of short texts in calls of their own, then the others.

        A cache that was read with the other angles, as for a shorter text, is read again.
        """
        outputs: dict[int, ForwardOutputs] = {}
        kinds = [long_rope.is_long(len(inputs.canvas.tokens)) for inputs in batch]
        for kv_cache, kind in zip(kv_caches, kinds, strict=True):
            if kv_cache.long_angles not in (None, kind):
                kv_cache.forget()
            kv_cache.long_angles = kind
        for kind in sorted(set(kinds)):
            same_kind = [number for number, each in enumerate(kinds) if each == kind]
            with long_rope.angles(kind):
                if self.fixed_shape_runner is not None and self.fixed_shape_runner.decoder is not None:
                    self.fixed_shape_runner.decoder.use_angles(kind)
                outputs_of_kind = self._forward_batch(
                    [batch[number] for number in same_kind], [kv_caches[number] for number in same_kind]
                )
            outputs |= zip(same_kind, outputs_of_kind, strict=True)
        return [outputs[number] for number in range(len(batch))]

    def _forward_batch(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[Any]) -> list[ForwardOutputs]:
        if self.fixed_shape_runner is None:
            return self._forward_in_chunks(batch, kv_caches)
        with native.kernel_threads_only() if self.device.type == "cpu" else torch.cuda.device(self.device):
            return self.fixed_shape_runner.forward(batch, kv_caches)

    def _forward_in_chunks(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[KVCache]) -> list[ForwardOutputs]:
        started = time.perf_counter()
        past = [self._reuse_kv_cache(kv_cache, inputs) for inputs, kv_cache in zip(batch, kv_caches, strict=True)]
        texts = enumerate(zip(batch, kv_caches, past, strict=True))
        queues = [list(self._chunks(text, *of_text)) for text, of_text in texts]
        logits: list[Any] = [None] * len(batch)
        states: list[list[torch.Tensor]] = [[] for _ in batch]
        with native.kernel_threads_only() if self.batch_invariant else contextlib.nullcontext():
            for chunks in chunks_by_call(queues, self.max_rows_per_call):
                own_logits, own_states = self._run_model(chunks)
                for chunk in chunks:
                    if chunk.num_logits:
                        logits[chunk.sequence] = own_logits[: chunk.num_logits]
                        own_logits = own_logits[chunk.num_logits :]
                    if chunk.output_hidden_states:
                        states[chunk.sequence].append(own_states[: chunk.rows.num_rows])
                    own_states = own_states[chunk.rows.num_rows :]
        contexts = [self.context_tokens(inputs.canvas) for inputs in batch]
        for inputs, kv_cache, context in zip(batch, kv_caches, contexts, strict=True):
            kv_cache.tokens = context.copy()
            kv_cache.pending_tree = inputs if inputs.tokens else None
        if self.device.type == "cuda":  # seconds include the whole call
            torch.cuda.current_stream(self.device).synchronize()
        seconds = time.perf_counter() - started
        read = [len(context) - length for context, length in zip(contexts, past, strict=True)]
        rows = sum(read) + sum(len(inputs.tokens) for inputs in batch)
        return [
            ForwardOutputs(
                logits[i], torch.cat(states[i]) if inputs.output_hidden_states else None, seconds, read[i], rows
            )
            for i, inputs in enumerate(batch)
        ]

    def _reuse_kv_cache(self, kv_cache: KVCache, inputs: ForwardInputs) -> int:
        """How many of the context tokens are in the KV cache."""
        return kv_cache.reuse_prefix(inputs.canvas.decided_prefix)

    def _chunks(self, sequence: int, inputs: ForwardInputs, kv_cache: KVCache, past_length: int) -> Iterator[Chunk]:
        """The chunks that one text still has to run."""
        return prefill_and_tree_chunks(sequence, inputs, kv_cache, past_length, query_start=self.query_start)

    def _run_model(self, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, torch.Tensor]:
        """One call of the model: the logits that chunks need; hidden states of all rows if a chunk needs them."""
        tokens, positions, logit_rows = rows_of_call(chunks)
        call = AttentionCall([chunk.rows for chunk in chunks], self.num_layers, self.batch_invariant)
        gate = gate_of_queries(chunks, self.device)
        if self.native_decoder is not None:
            states = any(chunk.output_hidden_states for chunk in chunks)
            return self.native_decoder(tokens, positions, call, logit_rows, states, gate, self.hidden_state_layers)
        tokens, positions, logit_rows = (each.to(self.device) for each in (tokens[None], positions[None], logit_rows))
        with attention.attention_context(call):
            return self._run_transformers(tokens, positions, logit_rows, gate, self.batch_invariant)

    def _run_fixed_shape(
        self, tokens: torch.Tensor, positions: torch.Tensor, num_logits: int, gate: StaticGate | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One call of a fixed shape: logits of the last rows (0: of all), and hidden states of all; see `RunModel`."""
        rows, kept = tokens.shape[1], num_logits
        if num_logits:  # by a number, Gemma 4 would leave out the other rows of layers that share keys, too
            kept = torch.arange(rows - num_logits, rows, device=tokens.device)
        return self._run_transformers(tokens, positions, kept, gate, tokens.device.type == "cpu")

    def _run_transformers(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor | int,
        gate: Gate | StaticGate | None,
        exact: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of some rows (0: of all), and hidden states of all; tokens and positions are [1, rows].

        With `exact` products and norms are computed by our kernels.
        """
        model = transformers_model(self.model)
        active_stream = getattr(self.model.config.get_text_config(), "altup_active_idx", None)
        capture = HiddenStateCapture(decoder_of(model), self.hidden_state_layers, active_stream)
        kernels = BatchInvariantMode() if exact else contextlib.nullcontext()
        gated = gated_adapter(model, self.adapter, gate) if gate and self.adapter else contextlib.nullcontext()
        with capture as hidden_states, kernels, gated:
            out = model(input_ids=tokens, position_ids=positions, logits_to_keep=logit_rows, use_cache=False)
        return out.logits[0], hidden_states()

    def add_hidden_state_layers(self, layers: Sequence[int]) -> None:
        """Return the states after these layers as well: after all layers, those before the last norm.

        Of layers with several streams (AltUp) they are those of the active one. Calls before this one returned fewer,
        see `layers_of`. Errors: ValueError if the model lacks one, or its last states are of another size (OPT-350m).
        """
        last_size = self.model.get_output_embeddings().weight.shape[1]
        if last_size != self.hidden_size:
            raise ValueError(
                f"the model's layers have hidden states of {self.hidden_size} numbers, and its last ones {last_size};"
                " drafters read states of one size: take a method without hidden states, such as lookup"
            )
        if missing := [layer for layer in layers if not 0 < layer <= self.num_layers]:
            raise ValueError(
                f"hidden states after layer {missing[0]} are needed, but the model has layers 1 to {self.num_layers};"
                " take a drafter that was trained for it"
            )
        with self.lock:
            if self.fixed_shape_runner is not None and not set(layers) <= set(self.hidden_state_layers):
                self.fixed_shape_runner.pool.graphs.clear()  # they return fewer hidden states
            self.layers_by_count[len(self.hidden_state_layers)] = self.hidden_state_layers
            self.hidden_state_layers = tuple(sorted({*self.hidden_state_layers, *layers}))
            if self.fixed_shape_runner is not None:
                self.fixed_shape_runner.hidden_state_layers = self.hidden_state_layers

    def layers_of(self, hidden_states: torch.Tensor) -> tuple[int, ...]:
        """The layers whose states these are, besides the last: of an earlier call perhaps fewer than now."""
        count = hidden_states.shape[-1] // self.hidden_size - 1
        now = self.hidden_state_layers
        return now if count == len(now) else self.layers_by_count[count]
