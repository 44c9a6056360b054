"""Attend by products of fixed shapes, so that a row's sums depend only on its position and its own tokens.

Matrix libraries choose kernels, and with them the order of sums, by shape. Here every shape is a function of the
rows of a call and of the extent, and both follow from positions (fixed_shapes.py). Only the slot of a key differs: a
node of a tree is in another slot than the same token as text. So a row at position p reads its keys in two parts,
split at a position that follows from p alone (`first_recent_position`), where D is the maximal depth of a tree:

- *old*, the positions before the split, a multiple of D that lies D to 2 D positions back. No tree is deeper than D,
  so these tokens are decided and in order. One masked product over the whole extent reads them.
- *recent*, from the split to p: 2 D columns that each row gathers from their slots, text or node.

One softmax covers both parts, in float32, and the two parts of the weighted sum are added. Whether an ancestor is
decided text or a node changes which slot is read, never the computation. Hidden columns have weight exactly zero.
The kernels must compute all rows of one product of one shape alike.

Query rows, which are never verified, attend in another way, and a mask chooses (`QueryInputs`): so their chains may be
longer than D.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from saltus.core.forward import ForwardInputs
from saltus.networks.adapters.gated_lora import Adapter, StaticGate

NUM_SCRATCH_SLOTS = 544  # slots before those of the text: slot 0 is for padding rows, slot i + 1 for node i


def first_recent_position(positions, max_tree_depth: int):
    """The first of the at most 2 · max_tree_depth positions that a row gathers; its own is the last."""
    return (positions // max_tree_depth * max_tree_depth - max_tree_depth).clip(0)


@dataclass
class KVBuffers:
    """Keys and values of one text, [layers, slots, kv_heads, dim]: slot NUM_SCRATCH_SLOTS + p is position p.

    Strides do not depend on the capacity. CUDA graphs hold the addresses of these buffers and are dropped with them.
    """

    num_layers: int
    capacity: int  # positions
    keys: Tensor | None = None
    values: Tensor | None = None
    graphs: dict = field(default_factory=dict)

    def reserve(self, key: Tensor, value: Tensor) -> None:
        """Allocate buffers shaped like a layer's keys and values [kv_heads, rows, dim], with finite values."""
        if self.keys is None:
            self.keys, self.values = self._zeros(key.transpose(0, 1)), self._zeros(value.transpose(0, 1))

    def grow(self, capacity: int) -> None:
        """Make room for more positions. Addresses change, so CUDA graphs are dropped."""
        if capacity <= self.capacity:
            return
        self.capacity = capacity
        self.graphs.clear()
        if self.keys is not None and self.values is not None:
            old = self.keys, self.values
            self.keys, self.values = (self._zeros(x[0]) for x in old)
            for new, x in zip((self.keys, self.values), old, strict=True):
                new[:, : x.shape[1]] = x

    def copy_slots(self, destination: Tensor, source: Tensor) -> None:
        """Copy slots `source` to slots `destination`, both [copies]."""
        for buffer in (self.keys, self.values):
            if buffer is not None:
                buffer.index_copy_(1, destination, buffer.index_select(1, source))

    def _zeros(self, like: Tensor) -> Tensor:
        _, heads, dim = like.shape
        return torch.zeros(
            self.num_layers, NUM_SCRATCH_SLOTS + self.capacity, heads, dim, dtype=like.dtype, device=like.device
        )


class StaticInputs:
    """The inputs of calls of `num_rows` rows, in one tensor whose address never changes: CUDA graphs read it."""

    def __init__(self, num_rows: int, max_tree_depth: int, device: torch.device) -> None:
        self.num_rows, self.max_tree_depth = num_rows, max_tree_depth
        sizes = [num_rows, num_rows, num_rows, num_rows * 2 * max_tree_depth, max_tree_depth, max_tree_depth]
        self.packed = torch.zeros(sum(sizes), dtype=torch.long, device=device)
        self.tokens, self.positions, self.slots, self.recent_slots, self.copy_destinations, self.copy_sources = (
            self.packed.split(sizes)
        )

    def fill(self, tokens, positions, slots, recent_slots, slot_copies) -> None:
        """Write a call's rows in one copy; padding rows are token 0 at position 0 in slot 0."""
        count, packed = len(tokens), np.zeros(len(self.packed), dtype=np.int64)
        for start, part in enumerate((tokens, positions, slots)):
            packed[start * self.num_rows : start * self.num_rows + count] = part
        packed[3 * self.num_rows : 3 * self.num_rows + recent_slots.size] = recent_slots.ravel()
        for side, start in enumerate((-2 * self.max_tree_depth, -self.max_tree_depth)):
            packed[start : start + len(slot_copies) or None] = [copy[side] for copy in slot_copies]
        self.packed.copy_(torch.from_numpy(packed))

    def clear(self) -> None:
        """Make all rows padding, without copies."""
        self.packed.zero_()


class QueryInputs:
    """What calls that contain queries need beyond `StaticInputs`, in tensors whose addresses never change."""

    def __init__(self, num_rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.bool) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.gate = StaticGate(zeros(num_rows), zeros(num_rows), zeros(num_rows, hidden_size, dtype=dtype))
        self.visible_nodes = zeros(num_rows, NUM_SCRATCH_SLOTS)
        self.node_positions = zeros(NUM_SCRATCH_SLOTS, dtype=torch.long)  # by slot
        self.num_decided = zeros(1, dtype=torch.long)  # positions of the text; a query attends to all of them

    def fill(self, inputs: ForwardInputs, nodes: np.ndarray, adapter: Adapter) -> None:
        """Write the queries of a call; `nodes` is the node of each row, below zero for decided tokens."""
        self.clear()
        rows = np.flatnonzero(nodes >= inputs.num_draft_tokens)
        queries, device = nodes[rows], self.num_decided.device
        base, visible = len(inputs.canvas.decided_prefix), np.zeros(self.visible_nodes.shape, dtype=bool)
        for row, query in zip(rows.tolist(), queries.tolist(), strict=True):
            visible[row, 1 + np.array(inputs.path(query))] = True
        positions = np.zeros(NUM_SCRATCH_SLOTS, dtype=np.int64)
        positions[1 : 1 + len(inputs.depths)] = base + np.array(inputs.depths)
        self.visible_nodes.copy_(torch.from_numpy(visible))
        self.node_positions.copy_(torch.from_numpy(positions))
        self.num_decided.fill_(base)
        index = torch.from_numpy(rows).to(device)
        self.gate.is_query[index] = True
        self.gate.has_token[index] = torch.tensor([inputs.kinds[query].has_token for query in queries], device=device)
        uniforms = np.array(inputs.uniforms)[queries - inputs.num_draft_tokens]
        uniforms = torch.from_numpy(uniforms).to(device)
        self.gate.embeddings[index] = adapter.auxiliary(uniforms, torch.full_like(uniforms, inputs.temperature))

    def clear(self) -> None:
        """No row is a query."""
        for tensor in (self.gate.is_query, self.gate.has_token, self.gate.embeddings, self.visible_nodes):
            tensor.zero_()
        self.num_decided.fill_(1)  # something to attend to

    def hidden_columns(self, positions: Tensor, extent: int, window: int | None) -> Tensor:
        """True for columns, the nodes' and then the text's, that a query must not attend to, [rows, slots]."""
        text = torch.arange(extent, device=positions.device)
        hidden = torch.cat([~self.visible_nodes, (text >= self.num_decided).expand(len(positions), -1)], -1)
        if window is not None:
            hidden |= torch.cat([self.node_positions, text]) <= positions[:, None] - window
        return hidden


class FixedShapeAttention:
    """The attention of one call: its rows over the first `extent` positions of the buffers."""

    def __init__(
        self, kv_buffers: KVBuffers, inputs: StaticInputs, extent: int, queries: QueryInputs | None = None
    ) -> None:
        self.kv_buffers, self.inputs, self.extent, self.queries = kv_buffers, inputs, extent, queries
        self.hidden_by_window: dict[int | None, Tensor] = {}
        self.hidden_from_queries: dict[int | None, Tensor] = {}  # by window, too

    def attend(self, module, query, key, value, scale: float, window: int | None, softcap: float | None) -> Tensor:
        """[1, heads, rows, dim] → [1, rows, heads, dim]; the new keys and values are written to the buffers."""
        buffers, inputs, extent = self.kv_buffers, self.inputs, self.extent
        buffers.reserve(key[0], value[0])
        assert buffers.keys is not None and buffers.values is not None
        keys, values = buffers.keys[module.layer_idx], buffers.values[module.layer_idx]  # [slots, kv_heads, dim]
        keys.index_copy_(0, inputs.slots, key[0].transpose(0, 1))
        values.index_copy_(0, inputs.slots, value[0].transpose(0, 1))
        heads, rows = query.shape[1:3]
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        q = (query[0].float() * scale).view(kv_heads, group, rows, -1)
        old_k, old_v = (
            x[NUM_SCRATCH_SLOTS : NUM_SCRATCH_SLOTS + extent].transpose(0, 1).float() for x in (keys, values)
        )
        recent_k, recent_v = (
            x.index_select(0, inputs.recent_slots).view(rows, -1, *x.shape[1:]).transpose(1, 2).float()
            for x in (keys, values)
        )  # [rows, kv_heads, 2 D, dim]
        old = q.flatten(1, 2) @ old_k.mT  # [kv_heads, group · rows, extent]
        recent = q.permute(2, 0, 1, 3) @ recent_k.mT  # [rows, kv_heads, group, 2 D]
        scores = torch.cat([old.view(kv_heads, group, rows, extent), recent.permute(1, 2, 0, 3)], -1)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(self._hidden_columns(window), -torch.inf).softmax(-1)
        out = (weights[..., :extent].flatten(1, 2) @ old_v).view(kv_heads, group, rows, -1).permute(2, 0, 1, 3)
        out = out + weights[..., extent:].permute(2, 0, 1, 3) @ recent_v
        if self.queries is not None:
            queries = self._attend_queries(q, keys, values, self.queries, window, softcap)
            out = torch.where(self.queries.gate.is_query[:, None, None, None], queries, out)
        return out.reshape(1, rows, heads, -1).to(query.dtype)

    def _attend_queries(
        self, q: Tensor, keys: Tensor, values: Tensor, queries: QueryInputs, window: int | None, softcap: float | None
    ) -> Tensor:
        """All rows as queries, over nodes and text in one masked product: [rows, kv_heads, group, dim]."""
        kv_heads, group, rows, _ = q.shape
        k, v = (x[: NUM_SCRATCH_SLOTS + self.extent].transpose(0, 1).float() for x in (keys, values))
        scores = (q.flatten(1, 2) @ k.mT).view(kv_heads, group, rows, -1)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if window not in self.hidden_from_queries:
            self.hidden_from_queries[window] = queries.hidden_columns(self.inputs.positions, self.extent, window)
        weights = scores.masked_fill(self.hidden_from_queries[window], torch.finfo(scores.dtype).min).softmax(-1)
        return (weights.flatten(1, 2) @ v).view(kv_heads, group, rows, -1).permute(2, 0, 1, 3)

    def _hidden_columns(self, window: int | None) -> Tensor:
        """True for columns that a row must not attend to, [rows, extent + 2 D]."""
        if window not in self.hidden_by_window:
            position = self.inputs.positions[:, None]
            border = first_recent_position(position, self.inputs.max_tree_depth)
            columns = torch.arange(self.extent, device=position.device).expand(len(position), -1)
            recent = border + torch.arange(2 * self.inputs.max_tree_depth, device=position.device)
            hidden = torch.cat([columns >= border, recent > position], -1)
            if window is not None:
                hidden |= torch.cat([columns, recent], -1) <= position - window
            self.hidden_by_window[window] = hidden
        return self.hidden_by_window[window]
