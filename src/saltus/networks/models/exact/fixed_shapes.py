"""Evaluate trees by calls of few fixed shapes, for devices whose libraries choose kernels by shape.

A decoding call always has `rows_per_call` rows, in plain decoding too: on an accelerator 32 rows cost about what one
costs. A prompt, except its last token, runs in calls of `prefill_chunk` rows that start at multiples of that. The
extent of attention is the first of min, 2 · min, 4 · min, … that holds the row's position; a tree that crosses such a
border takes two calls. So the shapes in which a token is evaluated follow from its position and from the end of its
prompt, never from the method, and the order of sums in attention follows from the position
(fixed_shape_attention.py). Texts of a batch run one after the other, since a wider call would be another shape.

Queries of an adapter share decoding calls with draft tokens. In such a call the adapter evaluates all rows, and a mask
takes its results for the queries alone; the model's own products have the shapes that they always have.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from saltus.core.forward import NO_TOKEN, PLACEHOLDER_TOKEN, ForwardInputs, ForwardOutputs
from saltus.networks.adapters.gated_lora import Adapter, StaticGate
from saltus.networks.kv_cache.kv_cache import KVCache
from saltus.networks.models.exact import attention
from saltus.networks.models.exact.fixed_shape_attention import (
    NUM_SCRATCH_SLOTS,
    FixedShapeAttention,
    KVBuffers,
    QueryInputs,
    StaticInputs,
    first_recent_position,
)

BASE_ROWS_PER_CALL = 32  # rows that an accelerator computes for about the price of one
log = logging.getLogger("saltus")

RunModel = Callable[[Tensor, Tensor, int, StaticGate | None], tuple[Tensor, Tensor]]
"""Tokens [1, rows], positions [1, rows], how many of the last rows have logits (0: all), the queries → logits, hidden
states."""


@dataclass
class FixedShapeKVCache:
    """The tokens of one text in the cache, and its buffers: text in its own slots, tree nodes in scratch slots."""

    token_history: KVCache = field(default_factory=KVCache)  # tokens and tree, without buffers
    kv_buffers: KVBuffers | None = None
    # (destination, source) slots of accepted nodes, copied by the next call
    pending_copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def tokens(self) -> np.ndarray:
        return self.token_history.tokens

    @property
    def keys(self) -> Tensor | None:
        return None if self.kv_buffers is None else self.kv_buffers.keys

    def reuse_prefix(self, tokens: np.ndarray) -> int:
        """How many of the decided tokens are in the cache; the accepted branch is kept."""
        if self.token_history.pending_tree is not None:
            base = len(self.token_history.tokens)
            nodes = self.token_history.pending_tree.match_tokens(tokens[base:])
            self.pending_copies += [(NUM_SCRATCH_SLOTS + base + depth, node + 1) for depth, node in enumerate(nodes)]
        return self.token_history.reuse_prefix(tokens)


class RowTable(NamedTuple):
    """The rows of one call: the columns of StaticInputs, and the output row of each (−1: none)."""

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    recent_slots: np.ndarray
    output_rows: np.ndarray

    def select(self, rows: np.ndarray | slice) -> RowTable:
        return RowTable(*(column[rows] for column in self))


@dataclass
class FixedShapeRunner:
    """Forward passes in fixed shapes, replayed from CUDA graphs with `use_cuda_graphs`.

    `rows_per_call` bounds the depth of a tree. Another value may round otherwise, and so change a text.
    """

    run_model: RunModel
    num_layers: int
    device: torch.device
    rows_per_call: int = BASE_ROWS_PER_CALL
    prefill_chunk: int = 256
    min_attention_extent: int = 512  # a multiple of prefill_chunk
    use_cuda_graphs: bool = False
    free_kv_buffers: list[KVBuffers] = field(default_factory=list)  # of finished texts
    adapter: Adapter | None = None  # of the query rows
    query_inputs: QueryInputs | None = None  # for this adapter
    static_inputs: dict[int, StaticInputs] = field(default_factory=dict)
    graph_memory_pool: Any = None  # shared by the graphs, which are replayed one at a time
    capture_stream: Any = None  # one for all captures, since matrix libraries keep a workspace for each stream

    def new_kv_cache(self) -> FixedShapeKVCache:
        return FixedShapeKVCache()

    def forward(self, inputs: ForwardInputs, kv_cache: FixedShapeKVCache) -> ForwardOutputs:
        """Logits after the decided text and after each node. Errors: ValueError if the tree is too deep or large."""
        started, nodes = time.perf_counter(), len(inputs.tokens)
        depth = max(inputs.depths[: inputs.num_draft_tokens], default=-1) + 1
        if nodes >= NUM_SCRATCH_SLOTS or depth > self.rows_per_call:
            raise ValueError(
                f"a tree of {nodes} nodes is {depth} deep, but calls hold paths of {self.rows_per_call} and trees of"
                f" {NUM_SCRATCH_SLOTS - 1}; load the model with a larger budget, or draft fewer tokens"
            )
        past = kv_cache.reuse_prefix(inputs.canvas.decided_prefix)
        try:
            logits, states = self._forward_rows(inputs, past, kv_cache)
        except BaseException:
            kv_cache.token_history, kv_cache.pending_copies = KVCache(), []
            raise
        kv_cache.token_history.tokens = inputs.canvas.decided_prefix.copy()
        kv_cache.token_history.pending_tree = inputs if nodes else None
        if self.device.type == "cuda":  # seconds include the whole call
            torch.cuda.current_stream(self.device).synchronize()
        read = len(inputs.canvas.decided_prefix) - past
        return ForwardOutputs(
            logits, states if inputs.output_hidden_states else None, time.perf_counter() - started, read, read + nodes
        )

    def _forward_rows(
        self, inputs: ForwardInputs, past_length: int, kv_cache: FixedShapeKVCache
    ) -> tuple[Tensor, Tensor]:
        """Logits and hidden states of the output rows, each [nodes + 1, …]."""
        buffers, pieces = self._assign_kv_buffers(kv_cache, len(inputs.canvas.tokens)), []
        for rows, width in _split_into_calls(inputs, past_length, self):
            queries = self._fill_queries(inputs, rows, width)
            out = self._run_rows(buffers, rows, width, kv_cache.pending_copies, queries)
            kv_cache.pending_copies = []
            if len(found := np.flatnonzero(rows.output_rows >= 0)):  # consecutive, at the end
                own = slice(int(found[0]), int(found[-1]) + 1)
                # copied, since the next call overwrites the outputs
                pieces.append((rows.output_rows[own], *(x[own].clone() for x in out)))
        if len(pieces) == 1:
            return pieces[0][1:]
        order = torch.from_numpy(np.argsort(np.concatenate([piece[0] for piece in pieces]))).to(self.device)
        logits, states = (torch.cat([piece[i] for piece in pieces])[order] for i in (1, 2))
        return logits, states

    def _assign_kv_buffers(self, kv_cache: FixedShapeKVCache, num_positions: int) -> KVBuffers:
        """The buffers of a text, large enough for all of it; buffers of finished texts are reused."""
        room = attention_extent(num_positions - 1, self.min_attention_extent)
        if kv_cache.kv_buffers is None:
            fitting = [buffers for buffers in self.free_kv_buffers if buffers.capacity >= room]
            buffers = min(fitting or self.free_kv_buffers, key=lambda buffers: buffers.capacity, default=None)
            if buffers is None:
                buffers = KVBuffers(self.num_layers, room)
            else:
                self.free_kv_buffers.remove(buffers)
            kv_cache.kv_buffers = buffers
            weakref.finalize(kv_cache, self.free_kv_buffers.append, buffers)
        kv_cache.kv_buffers.grow(room)
        return kv_cache.kv_buffers

    def attach_adapter(self, adapter: Adapter | None) -> None:
        """Use this adapter for queries. Graphs belong to its inputs: those of another one are not replayed."""
        self.adapter, self.query_inputs = adapter, None

    def _fill_queries(self, inputs: ForwardInputs, rows: RowTable, num_rows: int) -> QueryInputs | None:
        """The queries among the rows of a call; None if there are none."""
        nodes = rows.output_rows - 1
        if not (nodes >= inputs.num_draft_tokens).any():
            return None
        assert num_rows == self.rows_per_call, "prompts have no queries"
        assert self.adapter is not None
        if self.query_inputs is None:
            dtype = next(self.adapter.auxiliary.parameters()).dtype
            self.query_inputs = QueryInputs(num_rows, self.adapter.hidden_size, dtype, self.device)
        self.query_inputs.fill(inputs, nodes, self.adapter)
        return self.query_inputs

    def _run_rows(
        self,
        buffers: KVBuffers,
        rows: RowTable,
        num_rows: int,
        slot_copies: list[tuple[int, int]],
        queries: QueryInputs | None,
    ) -> tuple[Tensor, Tensor]:
        """Logits and hidden states of all rows; the next call overwrites them."""
        if num_rows not in self.static_inputs:
            self.static_inputs[num_rows] = StaticInputs(num_rows, self.rows_per_call, self.device)
        inputs = self.static_inputs[num_rows]
        extent = attention_extent(int(rows.positions[0]), self.min_attention_extent)
        shape = num_rows, extent, queries
        if self.use_cuda_graphs and shape not in buffers.graphs:
            self._capture_cuda_graph(buffers, inputs, extent, queries)
        inputs.fill(rows.tokens, rows.positions, rows.slots, rows.recent_slots, slot_copies)
        if not self.use_cuda_graphs:
            return self._run_static_inputs(buffers, inputs, extent, queries)
        graph, *out = buffers.graphs[shape]
        graph.replay()
        return out[0], out[1]

    def _run_static_inputs(
        self, buffers: KVBuffers, inputs: StaticInputs, attention_extent: int, queries: QueryInputs | None
    ) -> tuple[Tensor, Tensor]:
        num_logits = 0 if inputs.num_rows == self.rows_per_call else 1
        buffers.copy_slots(inputs.copy_destinations, inputs.copy_sources)
        with attention.attention_context(FixedShapeAttention(buffers, inputs, attention_extent, queries)):
            gate = None if queries is None else queries.gate
            return self.run_model(inputs.tokens[None], inputs.positions[None], num_logits, gate)

    def _capture_cuda_graph(
        self, buffers: KVBuffers, inputs: StaticInputs, attention_extent: int, queries: QueryInputs | None
    ) -> None:
        """Capture a call over these buffers, after two idle calls that load kernels and allocate memory."""
        inputs.clear()
        self.capture_stream = self.capture_stream or torch.cuda.Stream(self.device)
        self.graph_memory_pool = self.graph_memory_pool or torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self.device)
        self.capture_stream.wait_stream(current)
        with torch.cuda.stream(self.capture_stream):
            for _ in range(2):
                self._run_static_inputs(buffers, inputs, attention_extent, queries)
        current.wait_stream(self.capture_stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(
                graph, self.graph_memory_pool, self.capture_stream, capture_error_mode="thread_local"
            ):
                out = self._run_static_inputs(buffers, inputs, attention_extent, queries)
        except RuntimeError as error:
            self.use_cuda_graphs = False
            log.warning("calls cannot be captured as CUDA graphs and run without them: %s", str(error).splitlines()[0])
        else:
            buffers.graphs[inputs.num_rows, attention_extent, queries] = graph, *out


def rows_for_budget(budget: int) -> int:
    """Rows of a decoding call for the last decided token and `budget` nodes, a multiple of 32."""
    return (budget // BASE_ROWS_PER_CALL + 1) * BASE_ROWS_PER_CALL


def attention_extent(position: int, min_extent: int) -> int:
    """The first of min_extent, 2 · min_extent, 4 · min_extent, … that holds a position."""
    blocks = position // min_extent
    return min_extent << blocks.bit_length()


def _split_into_calls(
    inputs: ForwardInputs, past_length: int, runner: FixedShapeRunner
) -> Iterator[tuple[RowTable, int]]:
    """The calls of a forward pass, each (rows to evaluate, rows of the call). Parents come before children."""
    prompt = int(inputs.canvas.order[0]) - 1  # the last token of a prompt runs in a decoding call
    start = past_length // runner.prefill_chunk * runner.prefill_chunk if past_length < prompt else past_length
    rows = _make_rows(inputs, start, runner.rows_per_call)
    for at in range(0, prompt - start, runner.prefill_chunk):
        yield rows.select(slice(at, min(at + runner.prefill_chunk, prompt - start))), runner.prefill_chunk
    first = max(prompt - start, 0)
    extents = np.array(
        [attention_extent(position, runner.min_attention_extent) for position in rows.positions[first:].tolist()]
    )
    for extent in np.unique(extents):
        found = np.flatnonzero(extents == extent) + first
        for at in range(0, len(found), runner.rows_per_call):
            yield rows.select(found[at : at + runner.rows_per_call]), runner.rows_per_call


def _make_rows(inputs: ForwardInputs, start: int, max_tree_depth: int) -> RowTable:
    """The decided tokens from `start` on, then the nodes."""
    decided, nodes = inputs.canvas.decided_prefix, len(inputs.tokens)
    base = len(decided)
    unread = np.arange(start, base)
    positions = np.concatenate([unread, base + np.array(inputs.depths, dtype=np.int64)])
    slots = np.concatenate([NUM_SCRATCH_SLOTS + unread, 1 + np.arange(nodes)])
    recent = first_recent_position(positions, max_tree_depth)[:, None] + np.arange(2 * max_tree_depth)  # as positions
    hidden = recent > positions[:, None]
    ancestors = np.zeros((len(positions), max(inputs.depths, default=-1) + 2), dtype=np.int64)  # their slots by depth
    for node, (parent, depth) in enumerate(zip(inputs.parents, inputs.depths, strict=True)):
        row = len(unread) + node
        if parent >= 0:
            ancestors[row] = ancestors[len(unread) + parent]
        ancestors[row, depth] = node + 1
    depths = (recent - base).clip(0, ancestors.shape[1] - 1)
    recent_slots = np.where(recent < base, NUM_SCRATCH_SLOTS + recent, np.take_along_axis(ancestors, depths, 1))
    recent_slots = np.where(hidden, slots[:, None], recent_slots)
    output_rows = np.concatenate([np.where(unread == base - 1, 0, -1), 1 + np.arange(nodes)])
    known = [token if token != NO_TOKEN else PLACEHOLDER_TOKEN for token in inputs.tokens]
    tokens = np.concatenate([decided[start:], known]).astype(np.int64)
    return RowTable(tokens, positions, slots, recent_slots, output_rows)


def why_not_fixed_shapes(model: Any) -> str | None:
    """Why rows of a model depend on each other even in fixed shapes; None if they do not."""
    config, name = model.config.get_text_config(), type(model).__name__
    if any(getattr(config, count, None) for count in ("num_experts", "num_local_experts", "n_routed_experts")):
        return f"{name} has experts, whose number of rows depends on the text"
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rotary, *(each for each in rotary.values() if isinstance(each, dict))]
    if any(each.get("rope_type") in ("dynamic", "longrope") for each in kinds):
        return f"{name} scales the rotary angles of a call by its largest position"
    return None
