"""Find the likely tokens of many positions at once and grow draft paths of them, by compiled kernels where possible."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from saltus.core.coupling import PARALLEL_ERROR
from saltus.core.sampling import float_row
from saltus.kernels import native
from saltus.kernels.native import structs
from saltus.methods.shared.draft_tree import (
    MAX_CANDIDATES,
    MAX_GAP,
    MAX_NODES,
    Chooser,
    Likeliest,
    LikelyTokens,
    PathNode,
    SharedNoise,
    least_probability,
    likely_tokens,
)
from saltus.methods.shared.logit_correction import NonlinearCorrection
from saltus.models.cuda.host_copies import to_host


class RowCandidates(Sequence[LikelyTokens]):
    """The likely tokens of several positions, as the kernels read and write them.

    Not in arrays of NumPy, whose functions take long just after a call of the target.
    """

    def __init__(self, rows: int) -> None:
        size = rows * MAX_CANDIDATES
        self.columns, self.logits = (ctypes.c_int32 * size)(), (ctypes.c_float * size)()  # [rows, MAX_CANDIDATES]
        self.counts, self.rests = (structs.INTEGER * rows)(), (ctypes.c_float * rows)()
        self.rows = range(rows)  # of these arrays: the positions

    def copied(self, rows: int) -> RowCandidates:
        """A copy with room for more rows. Of all positions, not for a slice."""
        copied = RowCandidates(rows)
        for name in ("columns", "logits", "counts", "rests"):
            ctypes.memmove(getattr(copied, name), getattr(self, name), ctypes.sizeof(getattr(self, name)))
        return copied

    def addresses(self) -> tuple[int, int, int, int]:
        """Where the columns, logits, counts and rests of the first position are."""
        start = self.rows.start
        places = (
            (self.columns, 4 * MAX_CANDIDATES),
            (self.logits, 4 * MAX_CANDIDATES),
            (self.counts, 8),
            (self.rests, 4),
        )
        columns, logits, counts, rests = (ctypes.addressof(array) + start * size for array, size in places)
        return columns, logits, counts, rests

    def point(self, struct: structs.NearGreatest) -> None:
        """Let the kernel write here, as much as there is room for."""
        struct.columns, struct.values, struct.counts, struct.rests = self.addresses()
        struct.rows, struct.most, struct.gap = len(self), MAX_CANDIDATES, MAX_GAP

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> LikelyTokens: ...
    @overload
    def __getitem__(self, index: slice) -> RowCandidates: ...
    def __getitem__(self, index: int | slice) -> LikelyTokens | RowCandidates:
        if isinstance(index, slice):
            part = copy(self)
            part.rows = self.rows[index]
            assert part.rows.step == 1
            return part
        row = self.rows[index]
        start = row * MAX_CANDIDATES
        found = slice(start, start + self.counts[row])
        columns, logits = np.array(self.columns[found], dtype=np.int64), np.array(self.logits[found], dtype=np.float32)
        return LikelyTokens(columns, logits, self.rests[row])

    def __setitem__(self, index: int, likely: LikelyTokens) -> None:
        row, count = self.rows[index], len(likely.columns)
        start = row * MAX_CANDIDATES
        self.columns[start : start + count] = likely.columns.tolist()
        self.logits[start : start + count] = likely.logits.tolist()
        self.counts[row], self.rests[row] = count, likely.rest


def row_candidates(logits: Float[Tensor, "positions vocab"]) -> RowCandidates | None:
    """The likely tokens of each row; None where there is no kernel."""
    kernel = native.kernel("near_greatest", logits.dtype, logits.device)
    if kernel is None:
        return None
    logits = logits.contiguous()
    rows, vocab = logits.shape
    candidates = RowCandidates(rows)
    struct = structs.NearGreatest(x=logits.data_ptr(), size=vocab)
    candidates.point(struct)
    kernel(ctypes.byref(struct))
    return candidates


def rows_likely_tokens(logits: Float[Tensor, "positions vocab"]) -> Sequence[LikelyTokens]:
    """`likely_tokens` of each row; on a GPU they are found there, so that the logits need not be copied to the host."""
    if logits.is_cuda:
        return likely_on_device(logits)
    candidates = row_candidates(logits)
    return [likely_tokens(row) for row in float_row(logits)] if candidates is None else candidates


def likely_on_device(logits: Float[Tensor, "positions vocab"]) -> list[LikelyTokens]:
    """`rows_likely_tokens`, with one copy to the host."""
    logits = logits.float()
    values, columns = torch.topk(logits, min(MAX_CANDIDATES, logits.shape[1]))
    totals = (logits - values[:, :1]).exp().sum(1, dtype=torch.float64)
    found = to_host(torch.cat([values.double(), columns.double(), totals[:, None]], 1))[0].numpy()
    likely, most = [], values.shape[1]
    for row in found:
        if not np.isfinite(row[0]):
            likely.append(LikelyTokens(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32), 0.0))
            continue
        kept = np.flatnonzero(row[:most] > row[0] - MAX_GAP)
        kept = kept[np.argsort(row[most + kept])]
        ids, values = row[most + kept].astype(np.int64), (row[kept] - row[0]).astype(np.float32)
        likely.append(LikelyTokens(ids, values, max(float(row[-1] - np.exp(values).sum(dtype=np.float64)), 0.0)))
    return likely


@dataclass(frozen=True, eq=False)
class PathKernel:
    """`grown_nodes` by a compiled kernel, for the drafted tokens `token_ids` and their correction."""

    token_ids: Int[np.ndarray, "vocab"]
    correction: NonlinearCorrection | None
    tables: tuple[Tensor, ...] = ()  # of the drafted tokens, bfloat16 [vocab, rank]: right, A·e and B·e

    def __call__(
        self, candidates: RowCandidates, states: np.ndarray, text: Sequence[int], choose: Chooser
    ) -> list[PathNode] | None:
        """The nodes; None for a chooser that the kernel does not know. `states` are the correction's inputs."""
        if not supports_chooser(choose):
            return None
        fields: dict[str, int] = {"ids": native.address(self.token_ids)}
        fields |= zip(("columns", "logits", "counts", "rests"), candidates.addresses(), strict=True)
        if self.correction is not None:
            fields |= {"rank": states.shape[1], "states": native.address(states)}
            fields |= zip(("right", "left", "second_left"), (table.data_ptr() for table in self.tables), strict=True)
            fields |= self._text_fields(text)
        return grow_natively(choose, len(candidates), fields)

    def _text_fields(self, text: Sequence[int]) -> dict[str, int]:
        """What the correction needs of the last two tokens of a text: their columns in the tables, or their vectors."""
        assert self.correction is not None
        fields = {"last_column": -1, "column_before": -1}
        places = ("last_column", "text_left", "text_second_left"), ("column_before", "", "text_before")
        for token, (column, left, second_left) in zip(reversed(text), places, strict=False):
            fields[column] = self.column_of.get(token, -1)
            if fields[column] < 0:
                vectors = self.correction.token_vectors_of(token)
                fields |= {
                    name: native.address(x) for name, x in zip((left, second_left), vectors, strict=True) if name
                }
        return fields

    @cached_property
    def column_of(self) -> dict[int, int]:
        return {token: column for column, token in enumerate(self.token_ids.tolist())}


def supports_chooser(choose: Chooser) -> bool:
    """True if `grow_natively` can be used here, and for this chooser."""
    known = isinstance(choose, Likeliest) or (isinstance(choose, SharedNoise) and choose.is_gumbel_max)
    return known and native.load_kernels() is not None


def grow_natively(choose: Chooser, positions: int, fields: Mapping[str, int]) -> list[PathNode] | None:
    """`grown_nodes` by the kernel, for a chooser that it knows; None if it has no room for so many candidates.

    `fields` are those of `structs.DraftPaths` that say where the candidates come from.
    """
    nodes = grow_arrays(choose, positions, structs.DraftPaths(**fields), MAX_NODES)
    return None if nodes is None else list(zip(*(column.tolist() for column in nodes), strict=True))


def grow_arrays(
    choose: Chooser, positions: int, struct: structs.DraftPaths, max_nodes: int, confidence: float = 1.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """`grow_natively` with its nodes in arrays: parents and tokens in int64, and probabilities in float32.

    `struct` says where the candidates come from. `confidence` is a factor of all probabilities.
    """
    kernels = native.load_kernels()
    assert kernels is not None and isinstance(choose, Likeliest | SharedNoise)
    numbers, chances = np.empty((2, max_nodes), dtype=np.int64), np.empty(max_nodes, dtype=np.float32)
    struct.parents = native.address(numbers)
    struct.tokens, struct.chances = struct.parents + numbers.itemsize * max_nodes, native.address(chances)
    struct.positions, struct.choices, struct.nodes = positions, choose.top_k, max_nodes
    struct.least, struct.confidence = least_probability(max_nodes), confidence
    struct.error, struct.gap = PARALLEL_ERROR, MAX_GAP
    if isinstance(choose, SharedNoise):
        keys = choose.noise.keys_of_tokens("text", choose.positions[:positions])
        struct.keys, struct.temperature = native.address(keys), choose.sampling.temperature
    else:
        struct.keys, struct.temperature = None, choose.temperature
    count = kernels.saltus_draft_paths(ctypes.byref(struct))
    if count < 0:
        return None
    return numbers[0, :count], numbers[1, :count], chances[:count]


def path_kernel(
    token_ids: np.ndarray, correction: NonlinearCorrection | None, tables: Sequence[Tensor]
) -> PathKernel | None:
    """The kernel for a drafter on the CPU; None where it cannot be used."""
    rank = 0 if correction is None else correction.right.shape[1]
    if native.load_kernels() is None or rank % 16:
        return None
    return PathKernel(token_ids, correction, tuple(table.to(torch.bfloat16).contiguous() for table in tables))
