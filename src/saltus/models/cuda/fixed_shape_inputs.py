"""Hold the inputs of calls of fixed shape in tensors whose addresses never change: CUDA graphs read them."""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from saltus.kernels.batch_invariant_ops import BatchInvariantMode
from saltus.models.cuda.fixed_shape_rows import Call, FixedShape, TextRows
from saltus.models.cuda.kv_pages import PADDING_PAGE
from saltus.models.gated_lora import Adapter, StaticGate

MAX_TREE_NODES = 512  # of one text, its queries included


class StaticInputs:
    """The inputs of calls of one shape, in one tensor."""

    def __init__(self, shape: FixedShape, max_tree_depth: int, device: torch.device) -> None:
        self.shape, self.max_tree_depth = shape, max_tree_depth
        rows, tables = shape.num_rows, shape.num_groups * shape.num_pages
        sizes = [rows, rows, rows, rows * 2 * max_tree_depth, tables]
        self.packed = torch.zeros(sum(sizes), dtype=torch.long, device=device)
        self.tokens, self.positions, self.slots, self.recent_slots, block_tables = self.packed.split(sizes)
        self.block_tables = block_tables.view(shape.num_groups, shape.num_pages)  # the pages of each group's text

    def fill(self, call: Call) -> None:
        """Write the rows of a call in one copy; padding rows are token 0 at position 0 of the padding page."""
        (groups, by, pages, _), recent = self.shape, 2 * self.max_tree_depth
        source = torch.zeros(len(self.packed), dtype=torch.long, pin_memory=self.packed.device.type == "cuda")
        staged, num_rows = source.numpy(), groups * by
        rows = staged[: 3 * num_rows].reshape(3, num_rows)
        recent_slots = staged[3 * num_rows : (3 + recent) * num_rows].reshape(num_rows, recent)
        tables = staged[(3 + recent) * num_rows :].reshape(groups, pages)
        tables[:] = PADDING_PAGE
        for start, part in call.placed():
            span = slice(start, start + len(part))
            rows[:, span] = part.tokens, part.positions, part.kv_cache.slots(part.entries)
            recent_slots[span] = part.kv_cache.slots(part.recent_entries)
            table = part.kv_cache.pages[:pages]
            tables[start // by : -(-span.stop // by), : len(table)] = table
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
        # of each group's text: its decided tokens, all of which a query attends to, and its nodes' depths
        self.num_decided = zeros(groups, dtype=torch.long)
        self.node_depths = zeros(groups, MAX_TREE_NODES + 1, dtype=torch.long)

    def fill(self, call: Call, adapter: Adapter) -> None:
        """Write the queries of a call."""
        groups, by, rows = call.shape.num_groups, call.shape.rows_per_group, call.shape.num_rows
        is_query, has_token = np.zeros((2, rows), dtype=bool)
        visible = np.zeros(self.visible_nodes.shape, dtype=bool)
        uniforms, temperatures = np.full(rows, np.nan), np.zeros(rows)
        num_decided, depths = np.ones(groups, dtype=np.int64), np.zeros(self.node_depths.shape, dtype=np.int64)
        for start, part in call.placed():
            inputs, span = part.inputs, slice(start // by, -(-(start + len(part)) // by))
            assert inputs is not None, "drafters have no queries of adapters"
            num_decided[span] = len(inputs.canvas.decided_prefix)
            depths[span, : len(inputs.depths)] = inputs.depths
            temperatures[start : start + len(part)] = inputs.temperature
            for row in query_rows(part).tolist():
                query = int(part.output_rows[row]) - 1
                is_query[start + row], has_token[start + row] = True, inputs.kinds[query].has_token
                uniforms[start + row] = inputs.uniforms[query - inputs.num_draft_tokens]
                visible[start + row, inputs.path(query)] = True
        device = self.num_decided.device
        for tensor, array in (
            (self.gate.is_query, is_query), (self.gate.has_token, has_token), (self.visible_nodes, visible),
            (self.num_decided, num_decided), (self.node_depths, depths),
        ):  # fmt: skip
            tensor.copy_(torch.from_numpy(array))
        with BatchInvariantMode() if device.type == "cpu" else contextlib.nullcontext():
            conditioning = (torch.from_numpy(x).to(device) for x in (uniforms, temperatures))
            self.gate.embeddings.copy_(adapter.auxiliary(*conditioning))  # of all rows, in one shape

    def clear(self) -> None:
        """No row is a query."""
        self.gate.is_query.zero_()

    def hidden_entries(
        self, positions: Int[Tensor, "groups rows 1"], entries: Int[Tensor, "entries"], window: int | None
    ) -> Bool[Tensor, "groups rows entries"]:
        """True for entries of the KV cache that a query must not attend to: all but the text and its ancestors."""
        node = entries - self.num_decided[:, None]
        nearest = node.clamp(0, MAX_TREE_NODES)
        visible_nodes = self.visible_nodes.view(*positions.shape[:2], -1)
        visible = visible_nodes.gather(-1, nearest[:, None].expand(*positions.shape[:2], -1))
        hidden = (node >= 0)[:, None] & ~visible
        if window is not None:
            depths = self.node_depths.gather(-1, nearest)
            position = torch.where(node >= 0, self.num_decided[:, None] + depths, entries)
            hidden |= position[:, None] <= positions - window
        return hidden


def query_rows(part: TextRows) -> Int[np.ndarray, "queries"]:
    """Which rows are queries."""
    assert part.inputs is not None
    return np.flatnonzero(part.output_rows > part.inputs.num_draft_tokens)
