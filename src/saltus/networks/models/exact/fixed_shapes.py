"""Evaluate trees by calls of few fixed shapes: exact where libraries choose kernels by shape, and fit for CUDA graphs.

A decoding call has `width` rows, whoever asks and for however few: plain decoding too. On an accelerator a call of 32
rows costs about what one row costs. A prompt, but for its last token, is read by calls of `chunk` rows that start at
multiples of `chunk`. The extent of attention is the first of `least`, 2 · `least`, 4 · `least`, … that holds the
row's position; a tree that crosses such a border is evaluated by two calls. So the shapes in which a token is
evaluated follow from its position and from where its prompt ended, never from the method, and attention sums in an
order that follows from the position (canonical.py). Texts of a batch go one by one, since a wider call would be
another shape: a batch is as quick as its texts in turn.
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

from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.networks.kv_cache.kv_cache import KVCache
from saltus.networks.models.exact import attention
from saltus.networks.models.exact.fixed_shape_attention import (
    NUM_SCRATCH_SLOTS,
    FixedShapeAttention,
    KVBuffers,
    StaticInputs,
    first_recent_position,
)

BASE_ROWS_PER_CALL = 32  # rows that an accelerator computes for about the price of one
log = logging.getLogger("saltus")

RunModel = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""Tokens [1, rows], positions [1, rows], how many of the last rows have logits (0: all) → logits, features."""


@dataclass
class FixedShapeKVCache:
    """What was read of one text, and where its keys and values are: text in its own slots, nodes in scratch."""

    token_history: KVCache = field(default_factory=KVCache)  # of tokens only
    kv_buffers: KVBuffers | None = None
    pending_copies: list[tuple[int, int]] = field(
        default_factory=list
    )  # (to, at): accepted nodes, to be moved by the next call

    @property
    def tokens(self) -> np.ndarray:
        return self.token_history.tokens

    @property
    def keys(self) -> Tensor | None:
        return None if self.kv_buffers is None else self.kv_buffers.keys

    def reuse_prefix(self, tokens: np.ndarray) -> int:
        """How many of the decided tokens need not be read again; the branch that became text is kept."""
        if self.token_history.pending_tree is not None:
            base = len(self.token_history.tokens)
            nodes = self.token_history.pending_tree.match_tokens(tokens[base:])
            self.pending_copies += [(NUM_SCRATCH_SLOTS + base + depth, node + 1) for depth, node in enumerate(nodes)]
        return self.token_history.reuse_prefix(tokens)


class RowTable(NamedTuple):
    """What one call evaluates: the columns of a board, and where its logits belong (−1: nowhere)."""

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    recent_slots: np.ndarray
    output_rows: np.ndarray

    def select(self, rows: np.ndarray | slice) -> RowTable:
        return RowTable(*(column[rows] for column in self))


@dataclass
class FixedShapeRunner:
    """Forwards by fixed shapes. `graphs` replays each shape from a CUDA graph; without it the same code runs as it is.

    `width` bounds the depth of a tree, and is part of what a text depends on.
    """

    run_model: RunModel
    num_layers: int
    device: torch.device
    rows_per_call: int = BASE_ROWS_PER_CALL
    prefill_chunk: int = 256
    min_attention_extent: int = 512  # extent, a multiple of chunk
    use_cuda_graphs: bool = False
    free_kv_buffers: list[KVBuffers] = field(default_factory=list)  # seats whose texts are gone
    static_inputs: dict[int, StaticInputs] = field(default_factory=dict)
    graph_memory_pool: Any = None  # memory of the graphs, which are replayed one at a time
    capture_stream: Any = None  # for captures: matrix libraries keep a workspace for each stream

    def new_kv_cache(self) -> FixedShapeKVCache:
        return FixedShapeKVCache()

    def forward(self, inputs: ForwardInputs, kv_cache: FixedShapeKVCache) -> ForwardOutputs:
        """Logits after the decided text and after each node. Errors: ValueError if the tree is too deep or large."""
        started, nodes, depth = time.perf_counter(), len(inputs.tokens), max(inputs.depths, default=-1) + 1
        if nodes >= NUM_SCRATCH_SLOTS or depth > self.rows_per_call:
            raise ValueError(
                f"a tree of {nodes} nodes is {depth} deep, but calls hold paths of {self.rows_per_call} and trees of"
                f" {NUM_SCRATCH_SLOTS - 1}; load the model with a larger budget, or ask less"
            )
        past = kv_cache.reuse_prefix(inputs.canvas.decided_prefix)
        try:
            logits, features = self._forward_rows(inputs, past, kv_cache)
        except BaseException:
            kv_cache.token_history, kv_cache.pending_copies = KVCache(), []
            raise
        kv_cache.token_history.tokens = inputs.canvas.decided_prefix.copy()
        kv_cache.token_history.pending_tree = inputs if nodes else None
        if self.device.type == "cuda":  # so that seconds are those of the call
            torch.cuda.current_stream(self.device).synchronize()
        read = len(inputs.canvas.decided_prefix) - past
        return ForwardOutputs(
            logits, features if inputs.output_hidden_states else None, time.perf_counter() - started, read, read + nodes
        )

    def _forward_rows(
        self, inputs: ForwardInputs, past_length: int, kv_cache: FixedShapeKVCache
    ) -> tuple[Tensor, Tensor]:
        """Logits and features of the wanted rows, each [nodes + 1, …]."""
        sequence, pieces = self._assign_kv_buffers(kv_cache, len(inputs.canvas.tokens)), []
        for rows, width in _split_into_calls(inputs, past_length, self):
            out = self._run_rows(sequence, rows, width, kv_cache.pending_copies)
            kv_cache.pending_copies = []
            if len(places := np.flatnonzero(rows.output_rows >= 0)):  # they stand together, at the end
                own = slice(int(places[0]), int(places[-1]) + 1)
                pieces.append(
                    (rows.output_rows[own], *(x[own].clone() for x in out))
                )  # a call overwrites the one before
        if len(pieces) == 1:
            return pieces[0][1:]
        order = torch.from_numpy(np.argsort(np.concatenate([piece[0] for piece in pieces]))).to(self.device)
        logits, features = (torch.cat([piece[i] for piece in pieces])[order] for i in (1, 2))
        return logits, features

    def _assign_kv_buffers(self, kv_cache: FixedShapeKVCache, num_positions: int) -> KVBuffers:
        """The seat of a text, with room for all of it. Those of texts that are gone are taken again."""
        room = attention_extent(num_positions - 1, self.min_attention_extent)
        if kv_cache.kv_buffers is None:
            fitting = [sequence for sequence in self.free_kv_buffers if sequence.capacity >= room]
            sequence = min(fitting or self.free_kv_buffers, key=lambda sequence: sequence.capacity, default=None)
            if sequence is None:
                sequence = KVBuffers(self.num_layers, room)
            else:
                self.free_kv_buffers.remove(sequence)
            kv_cache.kv_buffers = sequence
            weakref.finalize(kv_cache, self.free_kv_buffers.append, sequence)
        kv_cache.kv_buffers.grow(room)
        return kv_cache.kv_buffers

    def _run_rows(
        self, sequence: KVBuffers, rows: RowTable, num_rows: int, slot_copies: list[tuple[int, int]]
    ) -> tuple[Tensor, Tensor]:
        """Logits and features of all rows; they are overwritten by the next call."""
        if num_rows not in self.static_inputs:
            self.static_inputs[num_rows] = StaticInputs(num_rows, self.rows_per_call, self.device)
        board, reach = self.static_inputs[num_rows], attention_extent(int(rows.positions[0]), self.min_attention_extent)
        if self.use_cuda_graphs and (num_rows, reach) not in sequence.graphs:
            self._capture_cuda_graph(sequence, board, reach)
        board.fill(rows.tokens, rows.positions, rows.slots, rows.recent_slots, slot_copies)
        if not self.use_cuda_graphs:
            return self._run_static_inputs(sequence, board, reach)
        graph, *out = sequence.graphs[num_rows, reach]
        graph.replay()
        return out[0], out[1]

    def _run_static_inputs(
        self, sequence: KVBuffers, inputs: StaticInputs, attention_extent: int
    ) -> tuple[Tensor, Tensor]:
        sequence.copy_slots(inputs.copy_destinations, inputs.copy_sources)
        with attention.attention_context(FixedShapeAttention(sequence, inputs, attention_extent)):
            return self.run_model(
                inputs.tokens[None], inputs.positions[None], 0 if inputs.num_rows == self.rows_per_call else 1
            )

    def _capture_cuda_graph(self, sequence: KVBuffers, inputs: StaticInputs, attention_extent: int) -> None:
        """Record a call over this seat, after two idle ones that load kernels and make buffers."""
        inputs.clear()
        self.capture_stream = self.capture_stream or torch.cuda.Stream(self.device)
        self.graph_memory_pool = self.graph_memory_pool or torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self.device)
        self.capture_stream.wait_stream(current)
        with torch.cuda.stream(self.capture_stream):
            for _ in range(2):
                self._run_static_inputs(sequence, inputs, attention_extent)
        current.wait_stream(self.capture_stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(
                graph, self.graph_memory_pool, self.capture_stream, capture_error_mode="thread_local"
            ):
                out = self._run_static_inputs(sequence, inputs, attention_extent)
        except RuntimeError as error:
            self.use_cuda_graphs = False
            log.warning("calls cannot be captured as CUDA graphs, going on without: %s", str(error).splitlines()[0])
        else:
            sequence.graphs[inputs.num_rows, attention_extent] = graph, *out


def rows_for_budget(budget: int) -> int:
    """Rows of a decoding call that holds the last decided token and so many nodes; few widths, so that texts agree."""
    return (budget // BASE_ROWS_PER_CALL + 1) * BASE_ROWS_PER_CALL


def attention_extent(position: int, min_extent: int) -> int:
    """The first of least, 2 least, 4 least, … that holds a position."""
    blocks = position // min_extent
    return min_extent << blocks.bit_length()


def _split_into_calls(
    inputs: ForwardInputs, past_length: int, runner: FixedShapeRunner
) -> Iterator[tuple[RowTable, int]]:
    """What is to be evaluated, cut into calls: (what they hold, their rows). Parents come before children."""
    prompt = int(inputs.canvas.order[0]) - 1  # the last token of a prompt is read as all that follow it are
    start = past_length // runner.prefill_chunk * runner.prefill_chunk if past_length < prompt else past_length
    rows = _make_rows(inputs, start, runner.rows_per_call)
    for place in range(0, prompt - start, runner.prefill_chunk):
        yield rows.select(slice(place, min(place + runner.prefill_chunk, prompt - start))), runner.prefill_chunk
    first = max(prompt - start, 0)
    extents = np.array(
        [attention_extent(position, runner.min_attention_extent) for position in rows.positions[first:].tolist()]
    )
    for one in np.unique(extents):
        places = np.flatnonzero(extents == one) + first
        for at in range(0, len(places), runner.rows_per_call):
            yield rows.select(places[at : at + runner.rows_per_call]), runner.rows_per_call


def _make_rows(inputs: ForwardInputs, start: int, max_tree_depth: int) -> RowTable:
    """The decided tokens from `start` on, then the nodes."""
    decided, nodes = inputs.canvas.decided_prefix, len(inputs.tokens)
    base = len(decided)
    unread = np.arange(start, base)
    positions = np.concatenate([unread, base + np.array(inputs.depths, dtype=np.int64)])
    slots = np.concatenate([NUM_SCRATCH_SLOTS + unread, 1 + np.arange(nodes)])
    recent = first_recent_position(positions, max_tree_depth)[:, None] + np.arange(2 * max_tree_depth)  # as positions
    hidden = recent > positions[:, None]
    ancestors = np.zeros((len(positions), max(inputs.depths, default=-1) + 2), dtype=np.int64)  # slots, by depth
    for node, (parent, depth) in enumerate(zip(inputs.parents, inputs.depths, strict=True)):
        row = len(unread) + node
        if parent >= 0:
            ancestors[row] = ancestors[len(unread) + parent]
        ancestors[row, depth] = node + 1
    depths = (recent - base).clip(0, ancestors.shape[1] - 1)
    where = np.where(recent < base, NUM_SCRATCH_SLOTS + recent, np.take_along_axis(ancestors, depths, 1))
    where = np.where(hidden, slots[:, None], where)
    wanted = np.concatenate([np.where(unread == base - 1, 0, -1), 1 + np.arange(nodes)])
    return RowTable(np.concatenate([decided[start:], inputs.tokens]).astype(np.int64), positions, slots, where, wanted)


def why_not_fixed_shapes(model: Any) -> str | None:
    """Why fixed shapes cannot make a model's rows independent; None where they can."""
    config, name = model.config.get_text_config(), type(model).__name__
    if any(getattr(config, count, None) for count in ("num_experts", "num_local_experts", "n_routed_experts")):
        return f"{name} has experts, which take as many rows as the text sends them"
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rotary, *(each for each in rotary.values() if isinstance(each, dict))]
    if any(each.get("rope_type") in ("dynamic", "longrope") for each in kinds):
        return f"{name} turns all rows of a call by the furthest of them"
    return None
