"""Evaluate trees by calls of few fixed shapes, for devices whose libraries choose kernels by shape.

Where our own kernels run the layers (`GPUDecoder`), rows are alike in calls of any size, and a call has as few rows as
its texts need. What follows is for the others.

A decoding call always has `rows_per_call` rows, for one text as for many, in plain decoding too: on an accelerator
128 rows cost little more than one. The rows of a batch are packed into as few such calls as needed. All products with
weights have the shape of the call, and attention is computed for each text by products of fixed shapes, too
(fixed_shape_attention.py). A prompt, except its last token, runs in calls of `prefill_chunk` rows that start at
multiples of that, one text a call. So the shapes in which a token is evaluated follow from its position and from the
end of its prompt, never from the method or from the other texts.

Keys and values are in pages of one pool (kv_pages.py), so CUDA graphs belong to a shape, not to a text.

Queries of an adapter share decoding calls with draft tokens. In such a call the adapter evaluates all rows, and a mask
takes its results for the queries alone; the model's own products have the shapes that they always have. Beside our own
kernels, which know no adapters, queries have calls of fixed shapes to themselves: they only draft.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from saltus.core.candidates import Candidates
from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.models.cpu import attention
from saltus.models.cuda.cuda_graphs import GraphCapture
from saltus.models.cuda.device_candidates import FoundCandidates
from saltus.models.cuda.fixed_shape_attention import MAX_TREE_NODES, FixedShapeAttention, QueryInputs, StaticInputs
from saltus.models.cuda.fixed_shape_calls import (
    Call,
    FixedShape,
    FixedShapeSettings,
    TextRows,
    rows_of_texts,
    split_into_calls,
)
from saltus.models.cuda.gpu_decoder import GPUDecoder
from saltus.models.cuda.gpu_experts import GPU_EXPERTS
from saltus.models.cuda.gpu_recurrent import StatesOfCall
from saltus.models.cuda.host_copies import to_host
from saltus.models.cuda.kernel_support import has_kernels
from saltus.models.cuda.kv_pages import FixedShapeKVCache, KVPagePool
from saltus.models.cuda.recurrent_inputs import RecurrentInputs, keep_snapshots
from saltus.models.cuda.state_pages import StateKVCache, StatePool
from saltus.models.gated_lora import Adapter, StaticGate
from saltus.models.memory_use import layer_sizes

DENSE_EXPERTS = {"llama4_text"}  # in whose layers every expert reads all rows, in one batched product or by our kernels
MAX_VARIED_ROWS = 512  # of a decoding call by our own kernels
MAX_ROWS_READ = 32  # of nodes' logits, copied with the tokens: of more, to copy those of accepted nodes is faster

RunModel = Callable[[Tensor, Tensor, int, StaticGate | None], tuple[Tensor, Tensor]]
"""Tokens [1, rows], positions [1, rows], how many of the last rows have logits (0: all), the queries → logits, hidden
states of all rows."""


class CallOutputs(NamedTuple):
    """What a call leaves for each row; of a call that reads a prompt only the last row has logits."""

    logits: Float[Tensor, "outputs vocab"]
    states: Float[Tensor, "rows states"] | None
    # float64: the token of the first greatest logit, that logit, the picked token or −1
    found: Float[Tensor, "3 outputs"]

    @classmethod
    def of(cls, logits: Tensor, states: Tensor, inputs: StaticInputs) -> CallOutputs:
        """With the tokens that rows pick, found on the device, so that decoding copies three numbers a row."""
        if logits.is_cuda and has_kernels(logits.device):
            from saltus.models.cuda.pick_kernels import find_tokens

            keys, temperatures = inputs.keys[-len(logits) :], inputs.temperatures[-len(logits) :]
            return cls(logits, states, find_tokens(logits, keys, temperatures))
        tokens = logits.argmax(-1)
        greatest = logits.gather(-1, tokens[:, None])[:, 0].double()  # bfloat16 would round tokens
        return cls(logits, states, torch.stack([tokens.double(), greatest, torch.full_like(greatest, -1)]))


def tokens_found(found: Float[Tensor, "3 outputs"]) -> Int[np.ndarray, "2 outputs"]:
    """The likeliest tokens of rows, −1 where they have none, and those that they picked; in the memory of the host."""
    tokens, greatest, picked = found.numpy()
    return np.stack([np.where(np.isfinite(greatest), tokens, -1), picked]).astype(np.int64)


class TextOutputs(NamedTuple):
    """What a text gets of the calls for its rows; see ForwardOutputs."""

    logits: Float[Tensor, "outputs vocab"]
    states: Float[Tensor, "rows states"] | None
    likeliest: Int[np.ndarray, "outputs"]
    picked: Int[np.ndarray, "outputs"]
    candidates: list[Candidates] | None


@dataclass
class FixedShapeRunner:
    """Forward passes of batches in fixed shapes, replayed from CUDA graphs with `use_cuda_graphs`."""

    run_model: RunModel
    num_layers: int
    device: torch.device
    settings: FixedShapeSettings = field(default_factory=FixedShapeSettings)
    use_cuda_graphs: bool = False
    pool: KVPagePool = field(init=False)
    decoder: GPUDecoder | None = None  # our own kernels, which run all rows but queries in place of `run_model`
    hidden_state_layers: tuple[int, ...] = ()  # that our kernels return, as CausalNetwork's
    adapter: Adapter | None = None  # of the query rows
    query_inputs: QueryInputs | None = None  # for this adapter
    static_inputs: dict[FixedShape, StaticInputs] = field(default_factory=dict)
    states: StatePool | None = field(init=False, default=None)  # of recurrent layers
    recurrent_inputs: dict[FixedShape, RecurrentInputs] = field(init=False, default_factory=dict)
    capture: GraphCapture = field(init=False)

    def __post_init__(self) -> None:
        self.pool = KVPagePool(self.num_layers, self.settings.page_size)
        self.capture = GraphCapture(self.device)
        if self.decoder is not None and (shape := self.decoder.state_shape) is not None:
            count, dtype = len(self.decoder.places_of_states), self.decoder.model.dtype
            self.states = StatePool(count, shape, dtype, self.device, self.pool.graphs.clear)
        if self.device.type == "cuda":  # parts of a product's sums are added in float32, in this process from now on
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    def new_kv_cache(self) -> FixedShapeKVCache:
        if self.states is None:
            return FixedShapeKVCache(self.pool)
        return StateKVCache(self.pool, states=self.states)

    def forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[FixedShapeKVCache]) -> list[ForwardOutputs]:
        """Logits after each decided text and after each of its nodes.

        Errors: ValueError if a tree is too deep or large. After any error the caches can be used.
        """
        started = time.perf_counter()
        for inputs in batch:
            self._check_tree(inputs)
        past = [
            kv_cache.reuse_prefix(inputs.canvas.decided_prefix)
            for inputs, kv_cache in zip(batch, kv_caches, strict=True)
        ]
        read = [len(inputs.canvas.decided_prefix) - length for inputs, length in zip(batch, past, strict=True)]
        for inputs, kv_cache in zip(batch, kv_caches, strict=True):
            kv_cache.reserve(len(inputs.canvas.decided_prefix) + len(inputs.tokens))
            if isinstance(kv_cache, StateKVCache):
                kv_cache.reserve_nodes(len(inputs.tokens))
        try:
            outputs = self._forward(batch, kv_caches, past)
        except BaseException:
            for kv_cache in kv_caches:
                kv_cache.forget()
            raise
        for inputs, kv_cache in zip(batch, kv_caches, strict=True):
            kv_cache.token_history.tokens = inputs.canvas.decided_prefix.copy()
            kv_cache.token_history.pending_tree = inputs if inputs.tokens else None
        seconds, rows = time.perf_counter() - started, sum(read) + sum(len(inputs.tokens) for inputs in batch)
        return [
            ForwardOutputs(
                out.logits,
                out.states,
                seconds,
                count,
                rows,
                likeliest=out.likeliest,
                picked=out.picked,
                candidates=out.candidates,
            )
            for count, out in zip(read, outputs, strict=True)
        ]

    def _check_tree(self, inputs: ForwardInputs) -> None:
        nodes, limit = len(inputs.tokens), self.settings.max_tree_depth
        depth = max(inputs.depths[: inputs.num_draft_tokens], default=-1) + 1
        if nodes > MAX_TREE_NODES or depth > limit:
            raise ValueError(
                f"a tree of {nodes} nodes is {depth} deep, but calls hold paths of {limit} and trees of"
                f" {MAX_TREE_NODES}; load the model with a larger max_draft_tokens, or draft fewer tokens"
            )

    def _forward(
        self, batch: Sequence[ForwardInputs], kv_caches: Sequence[FixedShapeKVCache], past_lengths: Sequence[int]
    ) -> list[TextOutputs]:
        """The output rows of each text, nodes + 1 of them, and the states of all that it read. Waits for the device.

        Outputs are copied for all texts of a call at once, before the next call overwrites them.
        """
        self.copy_accepted_nodes(kv_caches)
        settings, query_start = self.settings, self.adapter.settings.query_start if self.adapter else "blank"
        if self.decoder is not None:  # rows round alike in calls of any size: as few of them as a text needs
            settings = replace(settings, varied_rows=True, rows_per_call=MAX_VARIED_ROWS)
        texts = rows_of_texts(batch, kv_caches, past_lengths, settings, query_start)
        logits: list[list[Tensor]] = [[] for _ in batch]
        states: list[list[Tensor]] = [[] for _ in batch]
        found, places, num_found = list[Tensor](), [list[slice]() for _ in batch], 0  # of each text, in `found`
        for call in self._calls(texts, settings):
            out, placed = self._run_call(call), list(call.placed())
            if self.states is not None:
                keep_snapshots(call)
            ends = [start + part.num_rows for start, part in placed]
            outputs = [
                (max(start, end - 1 - int(part.output_rows[-1])), end, part.text)
                for (start, part), end in zip(placed, ends, strict=True)
                if part.output_rows[-1] >= 0
            ]
            if outputs:  # they are the last rows of a part
                first, last = outputs[0][0], outputs[-1][1]
                kept = out.logits[first:last].clone()
                found.append(out.found[:, first:last].clone())
                for start, end, text in outputs:
                    logits[text].append(kept[start - first : end - first])
                    places[text].append(slice(num_found + start - first, num_found + end - first))
                num_found += last - first
            if out.states is not None and any(batch[part.text].output_hidden_states for _, part in placed):
                kept = out.states[: ends[-1]].clone()
                for (start, part), end in zip(placed, ends, strict=True):
                    if batch[part.text].output_hidden_states:
                        states[part.text].append(kept[start:end])
        rows, tokens, candidates = _on_host(batch, [_joined(each) for each in logits], found)
        return [
            TextOutputs(
                own_rows,
                self._new_states(_joined(read), inputs, past) if read else None,
                *np.concatenate([tokens[:, place] for place in own], 1),
                candidates=likely,
            )
            for own_rows, read, own, likely, inputs, past in zip(
                rows, states, places, candidates, batch, past_lengths, strict=True
            )
        ]

    @staticmethod
    def _new_states(read: Tensor, inputs: ForwardInputs, past_length: int) -> Tensor:
        """Of the states of all rows those that `ForwardOutputs` has: a prompt's chunk may begin before these."""
        return read[-(len(inputs.canvas.decided_prefix) - past_length + len(inputs.tokens)) :]

    def _calls(self, texts: Sequence[TextRows], settings: FixedShapeSettings) -> Iterator[Call]:
        """The calls of these rows, in turn."""
        if self.decoder is None:
            yield from split_into_calls(texts, settings)
            return
        parts = [text.without_queries() for text in texts]
        yield from split_into_calls([drafts for drafts, _ in parts], settings)
        yield from split_into_calls([queries for _, queries in parts if queries is not None], self.settings)

    def copy_accepted_nodes(self, kv_caches: Sequence[FixedShapeKVCache]) -> None:
        """Copy the entries of accepted nodes to those of their positions."""
        slots = [
            kv_cache.slots(np.array(kv_cache.pending_copies).T) for kv_cache in kv_caches if kv_cache.pending_copies
        ]
        if slots:
            self.pool.copy_slots(*np.concatenate(slots, 1))
        for kv_cache in kv_caches:
            kv_cache.pending_copies = []

    @property
    def keeps_what_adapters_cannot_read(self) -> str | None:
        """What is kept of a text that is no keys and values, which the queries of adapters attend to; else None."""
        if self.states is not None:
            return "a state"
        return "latent vectors" if self.decoder is not None and self.decoder.keeps_latents else None

    def attach_adapter(self, adapter: Adapter | None) -> None:
        """Use this adapter for queries. Graphs belong to its inputs: those of another one are not replayed."""
        self.adapter, self.query_inputs = adapter, None
        for shape, has_queries in list(self.pool.graphs):
            if has_queries:
                del self.pool.graphs[shape, has_queries]

    def _run_call(self, call: Call) -> CallOutputs:
        """The outputs of all rows; the next call overwrites them."""
        shape = call.shape
        if shape not in self.static_inputs:
            self.static_inputs[shape] = StaticInputs(shape, self.settings.max_tree_depth, self.device)
        inputs, queries, recurrent = self.static_inputs[shape], None, self._allocated_recurrent_inputs(shape)
        if self.decoder is not None and self.decoder.reserve_positions(
            1 + max(int(p.positions.max()) for p in call.parts)
        ):
            self.pool.graphs.clear()
        if any(len(part.query_rows) for part in call.parts):
            queries = self._allocated_query_inputs(shape)
        key = shape, queries is not None
        if self.use_cuda_graphs and key not in self.pool.graphs:
            self._capture_cuda_graph(inputs, queries)
        inputs.fill(call)
        if recurrent is not None:
            recurrent.fill(call)
        if queries is not None:
            assert self.adapter is not None
            queries.fill(call, self.adapter)
        if not self.use_cuda_graphs:
            return self._run_static_inputs(inputs, queries)
        graph, out = self.pool.graphs[key]
        graph.replay()
        return out

    def _allocated_recurrent_inputs(self, shape: FixedShape) -> RecurrentInputs | None:
        """Those of calls of a model with states."""
        if self.states is not None and shape not in self.recurrent_inputs:
            taps, depth = self.states.shape.taps, self.settings.max_tree_depth
            self.recurrent_inputs[shape] = RecurrentInputs(shape, taps, depth, self.device)
        return self.recurrent_inputs.get(shape)

    def _allocated_query_inputs(self, shape: FixedShape) -> QueryInputs:
        """Those of decoding calls; prompts have no queries."""
        assert self.adapter is not None
        if self.query_inputs is None:
            dtype = next(self.adapter.auxiliary.parameters()).dtype
            self.query_inputs = QueryInputs(shape, self.adapter.hidden_size, dtype, self.device)
        return self.query_inputs

    def _run_static_inputs(self, inputs: StaticInputs, queries: QueryInputs | None) -> CallOutputs:
        if queries is None and self.decoder is not None:
            states = None
            if self.states is not None:
                states = StatesOfCall(self.states, self.recurrent_inputs[inputs.shape])
            return CallOutputs.of(*self.decoder(inputs, self.pool, self.hidden_state_layers, states), inputs)
        call = FixedShapeAttention(self.pool, inputs, self.settings.pages_per_block, queries)
        with attention.attention_context(call):
            gate = None if queries is None else queries.gate
            out = self.run_model(inputs.tokens[None], inputs.positions[None], inputs.shape.num_logits, gate)
            return CallOutputs.of(*out, inputs)

    def _capture_cuda_graph(self, inputs: StaticInputs, queries: QueryInputs | None) -> None:
        """Capture a call, or go on without graphs."""
        inputs.clear()
        if self.states is not None:
            self.recurrent_inputs[inputs.shape].clear()
        if queries is not None:
            queries.clear()
        captured = self.capture.capture_or_warn(lambda: self._run_static_inputs(inputs, queries), self.pool.graphs)
        if captured is None:
            self.use_cuda_graphs = False
        else:
            self.pool.graphs[inputs.shape, queries is not None] = captured


def _on_host(
    batch: Sequence[ForwardInputs], logits: Sequence[Tensor], found: Sequence[Tensor]
) -> tuple[list[Tensor], Int[np.ndarray, "2 outputs"], list[list[Candidates] | None]]:
    """By one wait: each text's rows of logits, on the host where it reads them; `tokens_found`; and candidates."""
    rows, reading, left = list(logits), list[int](), MAX_ROWS_READ
    for number, inputs in enumerate(batch):
        nodes = len(rows[number]) - 1  # of each text the first row is read in any case
        if inputs.reads_logits and not inputs.query_nodes and nodes <= left:
            reading.append(number)
            left -= nodes
    candidates = FoundCandidates.of(batch, logits)
    given = [torch.cat(list(found), 1) if len(found) > 1 else found[0]]
    given += [] if candidates is None else [candidates.table]
    given += [_joined([rows[number] for number in reading])] if reading else []
    tokens, *others = to_host(*given)
    likely: list[list[Candidates] | None] = [None] * len(batch)
    if candidates is not None:
        likely = candidates.read(others[0], len(batch))
    if reading:
        own = others[-1].split([len(rows[number]) for number in reading])
        for number, copied in zip(reading, own, strict=True):
            rows[number] = copied
    return rows, tokens_found(tokens), likely


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    """Pieces of rows, one after another; not copied if there is one."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def why_not_fixed_shapes(model: Any) -> str | None:
    """Why rows of a model depend on each other even in fixed shapes; None if they do not."""
    config, name = model.config.get_text_config(), type(model).__name__
    experts = any(getattr(config, count, None) for count in ("num_experts", "num_local_experts", "n_routed_experts"))
    ours = getattr(config, "_experts_implementation", None) == GPU_EXPERTS
    if experts and not ours and config.model_type not in DENSE_EXPERTS:
        return f"{name} has experts, whose number of rows depends on the text"
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rotary, *(each for each in rotary.values() if isinstance(each, dict))]
    if any(each.get("rope_type") in ("dynamic", "longrope") for each in kinds):
        return f"{name} scales the rotary angles of a call by its largest position"
    if len(set(layer_sizes(config))) > 1:
        return f"{name} has layers with different head sizes, which pages of one size cannot hold"
    return None
