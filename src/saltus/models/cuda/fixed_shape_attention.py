"""Attend by products of fixed shapes, so that a row's sums depend only on its position and its own tokens.

Matrix libraries choose kernels, and with them the order of sums, by shape. Here every product has a shape that is the
same in all calls of a kind, whichever texts share the call and however long they are. Only the entry of the KV cache
that holds a key differs: a node of a tree is in another entry than the same token as text. So a row at position p reads
its keys in two parts, split at a position that follows from p alone (`first_recent_position`), where D is the maximal
depth of a tree:

- *old*, the positions before the split, a multiple of D that lies D to 2 D positions back. No tree is deeper than D,
  so these tokens are decided and in order. They are read by blocks, one product for each, where all groups of rows
  take part: a group reads the pages of its own text. Blocks are added in the order of positions, and a block that a row
  does not see adds exactly zero. So a row's sums do not depend on the number of blocks in a call, which is that of the
  longest text. One product over the whole text would have a shape for each length; a kernel that reads pages itself
  would save copies, but would be another kernel on CPU, where this is tested.
- *recent*, from the split to p: 2 D columns that each row gathers from their entries, text or node.

One softmax covers both parts, in float32. Its maximum is the same in any order, and its two sums, of weights and of
weighted values, are those of the recent part and of each block. Whether an ancestor is decided text or a node changes
which entry is read, never the computation. Hidden columns have weight exactly zero. The kernels must compute all rows
of one product of one shape alike, and all products of a batched one.

Query rows, which are never verified, read all their keys from the blocks: so their chains may be longer than D.
"""

from __future__ import annotations

import contextlib
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from saltus.kernels.batch_invariant_ops import BatchInvariantMode
from saltus.models.attention_span import AttentionSpan, first_visible
from saltus.models.cpu.attention import note_layer
from saltus.models.cuda.fixed_shape_calls import Call, FixedShape, first_recent_position
from saltus.models.cuda.host_copies import to_device
from saltus.models.cuda.kv_pages import PADDING_PAGE, KVPagePool
from saltus.models.gated_lora import Adapter, StaticGate

MAX_TREE_NODES = 512  # of one text, its queries included
MAX_KEPT_BLOCKS = 16  # whose scores are kept for their weights; of longer texts they are computed twice, in less memory


class StaticInputs:
    """The inputs of calls of one shape, in one tensor, whose address never changes: CUDA graphs read it."""

    def __init__(self, shape: FixedShape, max_tree_depth: int, device: torch.device) -> None:
        self.shape, self.max_tree_depth = shape, max_tree_depth
        rows, tables = shape.num_rows, shape.num_groups * shape.num_pages
        sizes = rows, rows, rows, rows, 2 * rows, rows * 2 * max_tree_depth, tables
        ends = list(accumulate(sizes))
        self.spans = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self.packed = torch.zeros(ends[-1], dtype=torch.long, device=device)
        self.tokens, self.positions, self.slots, temperatures, keys, self.recent_slots, block_tables = (
            self.packed[span] for span in self.spans
        )
        self.temperatures = temperatures.view(torch.float64)  # of rows that pick, −1 of those without outputs, else 0
        self.keys = keys.view(rows, 2)  # of their noise
        self.block_tables = block_tables.view(shape.num_groups, shape.num_pages)  # the pages of each group's text

    def fill(self, call: Call) -> None:
        """Write the rows of a call in one copy; padding rows are token 0 at position 0 of the padding page."""
        groups, by, pages, _ = self.shape
        source = torch.zeros(len(self.packed), dtype=torch.long, pin_memory=self.packed.device.type == "cuda")
        host = source.numpy()
        tokens, positions, slots, temperatures, keys, recent_slots, tables = (host[span] for span in self.spans)
        temperatures, keys = temperatures.view(np.float64), keys.reshape(-1, 2)
        recent_slots, tables = recent_slots.reshape(self.shape.num_rows, -1), tables.reshape(groups, pages)
        tables[:], temperatures[:] = PADDING_PAGE, -1
        for start, part in call.placed():
            end = start + part.num_rows
            tokens[start:end], positions[start:end], slots[start:end] = part.tokens, part.positions, part.slots
            recent_slots[start:end] = part.recent_slots
            temperatures[start:end][part.output_rows >= 0] = 0
            if part.inputs is not None and (gumbel_max := part.inputs.gumbel_max) is not None:
                first, last = np.searchsorted(part.output_rows, (0, part.inputs.num_draft_tokens + 1))
                depths = np.array((0, *(1 + depth for depth in part.inputs.depths)))[part.output_rows[first:last]]
                picking = slice(start + first, start + last)
                temperatures[picking] = gumbel_max.temperature
                keys[picking] = gumbel_max.keys(part.inputs.canvas, depths)
            table = part.kv_cache.pages[:pages]
            tables[start // by : -(-end // by), : len(table)] = table
        self.packed.copy_(source, non_blocking=True)  # torch keeps pinned memory until it is copied

    def clear(self) -> None:
        """Make all rows padding."""
        self.packed.zero_()


class QueryInputs:
    """What calls that contain queries need beyond `StaticInputs`."""

    def __init__(self, shape: FixedShape, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        def zeros(*sizes: int, dtype: torch.dtype = torch.bool) -> Tensor:
            return torch.zeros(*sizes, dtype=dtype, device=device)

        groups, rows = shape.num_groups, shape.num_rows
        self.gate = StaticGate(zeros(rows), zeros(rows), zeros(rows, hidden_size, dtype=dtype))
        self.visible_nodes = zeros(rows, MAX_TREE_NODES + 1)  # the last column is never visible
        # of each group's text: its decided tokens, which every query attends to, and its nodes' positions after them
        self.num_decided = zeros(groups, dtype=torch.long)
        self.node_offsets = zeros(groups, MAX_TREE_NODES + 1, dtype=torch.long)

    def fill(self, call: Call, adapter: Adapter) -> None:
        """Write the queries of a call."""
        groups, by, rows = call.shape.num_groups, call.shape.rows_per_group, call.shape.num_rows
        is_query, has_token = np.zeros((2, rows), dtype=bool)
        visible = np.zeros(self.visible_nodes.shape, dtype=bool)
        uniforms, temperatures = np.full(rows, np.nan), np.zeros(rows)
        num_decided, offsets = np.ones(groups, dtype=np.int64), np.zeros(self.node_offsets.shape, dtype=np.int64)
        for start, part in call.placed():
            inputs, span = part.inputs, slice(start // by, -(-(start + part.num_rows) // by))
            assert inputs is not None, "drafters have no queries of adapters"
            num_decided[span] = len(inputs.canvas.decided_prefix)
            node_rows = inputs.node_rows(adapter.settings.query_start)
            offsets[span, : len(node_rows.offsets)] = node_rows.offsets
            temperatures[start : start + part.num_rows] = inputs.temperature
            for row in part.query_rows.tolist():
                query = int(part.output_rows[row]) - 1
                number = query - inputs.num_draft_tokens
                is_query[start + row], has_token[start + row] = True, node_rows.has_token[number]
                uniforms[start + row] = inputs.uniforms[number]
                visible[start + row, inputs.path(query)] = True
        device = self.num_decided.device
        for tensor, array in (
            (self.gate.is_query, is_query), (self.gate.has_token, has_token), (self.visible_nodes, visible),
            (self.num_decided, num_decided), (self.node_offsets, offsets),
        ):  # fmt: skip
            tensor.copy_(to_device(array, device))
        with BatchInvariantMode() if device.type == "cpu" else contextlib.nullcontext():
            conditioning = (to_device(x, device) for x in (uniforms, temperatures))
            self.gate.embeddings.copy_(adapter.auxiliary(*conditioning))  # of all rows, in one shape

    def clear(self) -> None:
        """No row is a query."""
        self.gate.is_query.zero_()

    def hidden_entries(
        self, positions: Int[Tensor, "groups rows 1"], entries: Int[Tensor, "entries"], span: AttentionSpan
    ) -> Bool[Tensor, "groups rows entries"]:
        """True for entries of the KV cache that a query must not attend to: all but the text and its ancestors."""
        node = entries - self.num_decided[:, None]
        nearest = node.clamp(0, MAX_TREE_NODES)
        visible_nodes = self.visible_nodes.view(*positions.shape[:2], -1)
        visible = visible_nodes.gather(-1, nearest[:, None].expand(*positions.shape[:2], -1))
        hidden = (node >= 0)[:, None] & ~visible
        if span is not None:
            offsets = self.node_offsets.gather(-1, nearest)
            position = torch.where(node >= 0, self.num_decided[:, None] + offsets, entries)
            hidden |= position[:, None] < first_visible(positions, span)
        return hidden


class FixedShapeAttention:
    """The attention of one call over the pages of its texts."""

    def __init__(
        self, pool: KVPagePool, inputs: StaticInputs, pages_per_block: int, queries: QueryInputs | None = None
    ) -> None:
        self.pool, self.inputs, self.queries = pool, inputs, queries
        self.pages_by_block = [pages.flatten() for pages in inputs.block_tables.split(pages_per_block, 1)]
        self.block = pages_per_block * pool.page_size  # positions
        self.hidden_by_reach: dict[AttentionSpan, tuple[Tensor, Tensor, Tensor]] = {}
        self.attended: set[int] = set()  # layers

    @property
    def positions(self) -> Int[Tensor, "1 rows"]:
        return self.inputs.positions[None]

    def attend(
        self,
        module: Any,
        query: Float[Tensor, "1 heads rows dim"],
        key: Float[Tensor, "1 kv_heads rows dim"],
        value: Float[Tensor, "1 kv_heads rows value_dim"],
        scale: float,
        span: AttentionSpan,
        softcap: float | None,
        sinks: Float[Tensor, "heads"] | None,
    ) -> Float[Tensor, "1 rows heads value_dim"]:
        """Write the keys and values of a layer to their slots, and attend."""
        note_layer(self.attended, module)
        self.pool.allocate([(key[0], value[0])])
        keys, values = self.pool.of_layer(module.layer_idx)
        keys.index_copy_(0, self.inputs.slots, key[0].transpose(0, 1))
        values.index_copy_(0, self.inputs.slots, value[0].transpose(0, 1))
        rows, kv_heads, groups = query.shape[2], key.shape[1], self.inputs.shape.num_groups
        q = (query[0].float() * scale).view(kv_heads, -1, groups, rows // groups, query.shape[3])
        shared = q.shape[1]  # query heads that share keys
        by_group = q.permute(2, 0, 1, 3, 4).flatten(2, 3).flatten(0, 1)  # [groups · kv_heads, shared · rows, dim]
        by_row = q.permute(2, 3, 0, 1, 4).flatten(1, 2).reshape(rows * kv_heads, shared, -1)

        hidden_old, hidden_recent, unread_old = self._hidden_columns(span)

        def scores_of(number: int) -> Tensor:
            """[groups, kv_heads, shared, rows of a group, block] of a block"""
            scores = (by_group @ self._block(keys, number).mT).view(groups, kv_heads, shared, -1, self.block)
            return _masked(scores, hidden_old[number], softcap)

        blocks = range(len(self.pages_by_block))
        if len(blocks) <= MAX_KEPT_BLOCKS:
            old_scores = [scores_of(number) for number in blocks].__getitem__
        else:
            old_scores = scores_of
        recent = (by_row @ self._recent(keys).mT).view(rows, kv_heads, shared, -1)
        recent = _masked(recent, hidden_recent, softcap)

        def as_rows(x: Tensor) -> Tensor:
            """[groups, kv_heads, shared, rows of a group, …] → [rows, kv_heads, shared, …]"""
            return x.movedim(3, 1).flatten(0, 1)

        greatest = old_scores(0).amax(-1)
        for number in blocks[1:]:
            greatest = torch.maximum(greatest, old_scores(number).amax(-1))
        largest = torch.maximum(as_rows(greatest), recent.amax(-1))
        if sinks is not None:
            sinks = sinks.float().view(kv_heads, shared)
            largest = torch.maximum(largest, sinks)
        by_groups = largest.view(groups, -1, kv_heads, shared).movedim(1, 3)
        recent = (recent - largest[..., None]).exp()
        total = out = recent.new_zeros(())
        for number in blocks:
            weights = (old_scores(number) - by_groups[..., None]).exp()
            total = total + weights.sum(-1)
            read = self._block(values, number).unflatten(0, (groups, kv_heads)).masked_fill(unread_old[number], 0)
            product = weights.flatten(0, 1).flatten(1, 2) @ read.flatten(0, 1)
            out = out + product.view(*weights.shape[:-1], -1)
        total = as_rows(total) + recent.sum(-1)
        if sinks is not None:
            total = total + (sinks - largest).exp()
        out = as_rows(out) + (recent.flatten(0, 1) @ self._recent(values)).view(rows, kv_heads, shared, -1)
        return (out / total[..., None]).view(1, rows, kv_heads * shared, -1).to(query.dtype)

    def _block(self, buffer: Tensor, number: int) -> Float[Tensor, "products block dim"]:
        """What one product reads: of each group some pages of its text."""
        pages = buffer.view(-1, self.pool.page_size, *buffer.shape[1:]).index_select(0, self.pages_by_block[number])
        return _by_heads(pages.view(-1, self.block, *buffer.shape[1:]))

    def _recent(self, buffer: Tensor) -> Float[Tensor, "products recent dim"]:
        """The columns that each row gathers."""
        slots = buffer.index_select(0, self.inputs.recent_slots)
        return _by_heads(slots.view(self.inputs.shape.num_rows, -1, *buffer.shape[1:]))

    def _hidden_columns(
        self, span: AttentionSpan
    ) -> tuple[
        Bool[Tensor, "blocks groups 1 1 rows block"],
        Bool[Tensor, "num_rows 1 1 recent"],
        Bool[Tensor, "blocks groups 1 block 1"],
    ]:
        """True for columns that a row must not attend to, and for those that no row of a group does.

        The latter may be a former text's, and not finite: their values must not be multiplied, not even by 0.
        """
        if span not in self.hidden_by_reach:
            shape, depth = self.inputs.shape, self.inputs.max_tree_depth
            positions = self.inputs.positions.view(shape.num_groups, -1, 1)
            border = first_recent_position(positions, depth)
            old = torch.arange(shape.num_pages * self.pool.page_size, device=positions.device)
            recent = border + torch.arange(2 * depth, device=positions.device)
            hidden_old, hidden_recent = old >= border, recent > positions
            if span is not None:
                first = first_visible(positions, span)
                hidden_old, hidden_recent = (
                    hidden | (columns < first) for hidden, columns in ((hidden_old, old), (hidden_recent, recent))
                )
            if self.queries is not None:
                is_query = self.queries.gate.is_query.view_as(positions)
                hidden_old = torch.where(is_query, self.queries.hidden_entries(positions, old, span), hidden_old)
                hidden_recent = hidden_recent | is_query
            by_block = hidden_old.unflatten(-1, (-1, self.block)).movedim(2, 0)
            unread, hidden_recent = by_block.all(2)[:, :, None, :, None], hidden_recent.flatten(0, 1)
            self.hidden_by_reach[span] = by_block[:, :, None, None], hidden_recent[:, None, None], unread
        return self.hidden_by_reach[span]


def _by_heads(x: Float[Tensor, "batch columns kv_heads dim"]) -> Float[Tensor, "_ columns dim"]:
    """In float32, copied into one order of dimensions whatever there was."""
    return x.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format).flatten(0, 1)


def _masked(scores: Tensor, hidden: Tensor, softcap: float | None) -> Tensor:
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(hidden, -torch.inf)
