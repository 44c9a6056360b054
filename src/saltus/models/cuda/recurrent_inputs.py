"""The inputs of recurrent layers in a call of a fixed shape: which tokens each row and each text's state continue."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from saltus.models.cuda.fixed_shape_calls import Call, FixedShape, TextRows
from saltus.models.cuda.state_pages import StateKVCache

# A source is the row of a call; or a node that was kept, with this added; or −1 − an input before the call.
OF_NODES = 1 << 40


class Jobs(NamedTuple):
    """What recurrences do in a call: each job continues the state of a slot, by sources of a table and then by rows."""

    slots: Tensor  # [jobs]
    tables: Tensor  # [jobs, width] sources
    counts: Tensor  # [jobs] of them that count
    firsts: Tensor  # [jobs] the first row
    rows: Tensor  # [jobs] how many


def keep_snapshots(call: Call) -> None:
    """Let the texts of a call keep copies of their states where they may go back to."""
    for part in call.parts:
        assert isinstance(part.kv_cache, StateKVCache) and part.inputs is not None
        base = len(part.inputs.canvas.decided_prefix)
        decided = int(np.searchsorted(part.entries, base))
        part.kv_cache.keep_snapshot(decided, bool(part.entries[-1] == base - 2))


class RecurrentInputs:
    """Tables in one tensor, whose address never changes: CUDA graphs read it. For sources see recurrent_kernels.py."""

    def __init__(self, shape: FixedShape, taps: int, max_tree_depth: int, device: torch.device) -> None:
        rows, groups = shape.num_rows, shape.num_groups
        self.shape, self.taps, self.depth = shape, taps, max_tree_depth
        self.sizes = [
            (rows, taps), (groups, taps), (rows,), *self._jobs(groups), *self._jobs(rows),
        ]  # fmt: skip
        counts = [int(np.prod(size)) for size in self.sizes]
        # each begins at a multiple of 16 bytes: Triton has another binary for pointers that do not
        ends = list(accumulate(count + count % 2 for count in counts))
        self.spans = [slice(end - count - count % 2, end - count % 2) for end, count in zip(ends, counts, strict=True)]
        self.packed = torch.zeros(ends[-1], dtype=torch.long, device=device)
        views = [self.packed[span].view(size) for span, size in zip(self.spans, self.sizes, strict=True)]
        self.row_sources, self.text_sources, self.node_places = views[:3]
        self.texts, self.nodes = Jobs(*views[3:8]), Jobs(*views[8:])
        self.clear()

    def _jobs(self, count: int) -> list[tuple[int, ...]]:
        return [(count,), (count, self.depth), (count,), (count,), (count,)]

    def clear(self) -> None:
        """Make all rows padding."""
        self.packed.zero_()
        self.node_places.fill_(-1)

    def fill(self, call: Call) -> None:
        """Write the tables of a call, and note what the states of its texts have read then."""
        source = torch.zeros(len(self.packed), dtype=torch.long, pin_memory=self.packed.device.type == "cuda")
        tables = [source.numpy()[span].reshape(size) for span, size in zip(self.spans, self.sizes, strict=True)]
        tables[2][:] = -1
        for text, (start, part) in enumerate(call.placed()):
            self._fill_part(tables, text, start, part)
        self.packed.copy_(source, non_blocking=True)

    def _fill_part(self, tables: list[np.ndarray], text: int, start: int, part: TextRows) -> None:
        row_sources, text_sources, node_places = tables[:3]
        slots, accepted, counts, firsts, rows = tables[3:8]
        cache, inputs, taps = part.kv_cache, part.inputs, self.taps
        assert isinstance(cache, StateKVCache) and inputs is not None
        base, own = len(inputs.canvas.decided_prefix), slice(start, start + part.num_rows)
        decided = int(np.searchsorted(part.entries, base))
        applied = [OF_NODES + node for node in cache.accepted]
        window = -1 - (cache.slot * taps + np.arange(taps))
        history = np.concatenate([window, applied, start + np.arange(decided)]).astype(np.int64)
        windows = np.lib.stride_tricks.sliding_window_view(history, taps)
        row_sources[start : start + decided] = windows[len(applied) : len(applied) + decided]
        text_sources[text] = windows[-1]
        slots[text], counts[text], firsts[text], rows[text] = cache.slot, len(applied), start, decided
        accepted[text, : len(applied)] = applied
        if decided < part.num_rows:
            nodes = part.entries[decided:] - base
            cache.reserve_nodes(int(nodes[-1]) + 1)
            node_places[own.start + decided : own.stop] = [cache.node_place(node) for node in nodes.tolist()]
            self._fill_nodes(tables, start + decided, nodes, inputs.parents, cache, windows[-1])
        cache.note_read(decided)

    def _fill_nodes(
        self, tables: list[np.ndarray], start: int, nodes: Int[np.ndarray, "nodes"], parents: Sequence[int],
        cache: StateKVCache, window: Int[np.ndarray, "taps"],
    ) -> None:  # fmt: skip
        """Of nodes whose rows begin at `start`, after the text that ends with a window."""
        row_sources, slots, paths, counts, firsts, rows = tables[0], *tables[8:]
        first, numbers, end = int(nodes[0]), nodes.tolist(), list(map(int, window))
        own, path_of = slice(start, start + len(numbers)), dict[int, list[int]]()
        for node in range(numbers[-1] + 1):  # those before the first one are rows of an earlier call
            parent = parents[node]
            source = start + parent - first if parent >= first else OF_NODES + cache.node_place(max(parent, 0))
            path_of[node] = [*path_of[parent], source] if parent >= 0 else []
        row_sources[own] = [[*end, *path_of[node]][-self.taps :] for node in numbers]
        paths[own] = [path_of[node] + [0] * (self.depth - len(path_of[node])) for node in numbers]
        counts[own] = [len(path_of[node]) for node in numbers]
        slots[own], firsts[own], rows[own] = cache.slot, np.arange(own.start, own.stop), 1
