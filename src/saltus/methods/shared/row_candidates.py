"""Find the likely tokens of many positions at once and grow draft paths of them, by compiled kernels where possible."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from saltus.core.coupling import PARALLEL_ERROR
from saltus.core.sampling import float_row
from saltus.kernels import native
from saltus.methods.shared.draft_tree import (
    MAX_CANDIDATES,
    MAX_GAP,
    MAX_NODES,
    MIN_PATH_PROBABILITY,
    Chooser,
    Likeliest,
    LikelyTokens,
    PathNode,
    SharedNoise,
    likely_tokens,
)
from saltus.methods.shared.logit_correction import NonlinearCorrection


@dataclass(frozen=True, eq=False)
class RowCandidates(Sequence[LikelyTokens]):
    """The likely tokens of several positions, as the kernels read and write them."""

    columns: Int[np.ndarray, "positions candidates"]  # int32
    logits: Float[np.ndarray, "positions candidates"]
    counts: Int[np.ndarray, "positions"]
    rests: Float[np.ndarray, "positions"]

    @classmethod
    def empty(cls, rows: int) -> RowCandidates:
        """Room for the kernel to write to."""
        return cls(
            np.empty((rows, MAX_CANDIDATES), dtype=np.int32),
            np.empty((rows, MAX_CANDIDATES), dtype=np.float32),
            np.empty(rows, dtype=np.int64),
            np.empty(rows, dtype=np.float32),
        )

    def point(self, struct: native.NearGreatest) -> None:
        """Let the kernel write here, as much as there is room for."""
        struct.places, struct.values = native.address(self.columns), native.address(self.logits)
        struct.counts, struct.rests = native.address(self.counts), native.address(self.rests)
        (struct.rows, struct.most), struct.gap = self.columns.shape, MAX_GAP

    def __len__(self) -> int:
        return len(self.counts)

    @overload
    def __getitem__(self, index: int) -> LikelyTokens: ...
    @overload
    def __getitem__(self, index: slice) -> RowCandidates: ...
    def __getitem__(self, index: int | slice) -> LikelyTokens | RowCandidates:
        if isinstance(index, slice):
            return RowCandidates(self.columns[index], self.logits[index], self.counts[index], self.rests[index])
        count = int(self.counts[index])
        columns = self.columns[index, :count].astype(np.int64)
        return LikelyTokens(columns, self.logits[index, :count], float(self.rests[index]))


def row_candidates(logits: Float[Tensor, "positions vocab"]) -> RowCandidates | None:
    """The likely tokens of each row; None where there is no kernel."""
    kernel = native.kernel("near_greatest", logits.dtype, logits.device)
    if kernel is None:
        return None
    logits = logits.contiguous()
    rows, vocab = logits.shape
    candidates = RowCandidates.empty(rows)
    struct = native.NearGreatest(x=logits.data_ptr(), size=vocab)
    candidates.point(struct)
    kernel(ctypes.byref(struct))
    return candidates


def rows_likely_tokens(logits: Float[Tensor, "positions vocab"]) -> Sequence[LikelyTokens]:
    """`likely_tokens` of each row."""
    candidates = row_candidates(logits)
    return [likely_tokens(row) for row in float_row(logits)] if candidates is None else candidates


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
        if not knows_chooser(choose):
            return None
        fields: dict[str, int] = {
            "columns": native.address(candidates.columns), "logits": native.address(candidates.logits),
            "counts": native.address(candidates.counts), "rests": native.address(candidates.rests),
            "ids": native.address(self.token_ids),
        }  # fmt: skip
        if self.correction is not None:
            fields |= {"rank": states.shape[1], "states": native.address(states)}
            fields |= zip(("right", "left", "second_left"), (table.data_ptr() for table in self.tables), strict=True)
            vectors = [self.correction.token_vectors_of(token) for token in text]
            if vectors:
                fields |= zip(
                    ("text_left", "text_second_left"), (native.address(vector) for vector in vectors[-1]), strict=True
                )
            if len(vectors) > 1:
                fields["text_before"] = native.address(vectors[-2][1])
        return grow_natively(choose, len(candidates.counts), fields)


def knows_chooser(choose: Chooser) -> bool:
    """True if `grow_natively` can be used here, and for this chooser."""
    known = isinstance(choose, Likeliest) or (isinstance(choose, SharedNoise) and choose.is_gumbel_max)
    return known and native.load_kernels() is not None


def grow_natively(choose: Chooser, positions: int, fields: Mapping[str, int]) -> list[PathNode] | None:
    """`grown_nodes` by the kernel, for a chooser that it knows; None if it has no room for so many candidates.

    `fields` are those of `native.DraftPaths` that say where the candidates come from.
    """
    kernels = native.load_kernels()
    assert kernels is not None and isinstance(choose, Likeliest | SharedNoise)
    parents, tokens, chances = (np.empty(MAX_NODES, dtype=each) for each in (np.int64, np.int64, np.float32))
    struct = native.DraftPaths(
        **fields, positions=positions, choices=choose.top_k, nodes=MAX_NODES, least=MIN_PATH_PROBABILITY,
        error=PARALLEL_ERROR, gap=MAX_GAP, parents=native.address(parents), tokens=native.address(tokens),
        chances=native.address(chances),
    )  # fmt: skip
    if isinstance(choose, SharedNoise):
        keys = choose.noise.keys_of_tokens("text", choose.positions[:positions])
        struct.keys, struct.temperature = native.address(keys), choose.sampling.temperature
    else:
        struct.temperature = choose.temperature
    count = kernels.saltus_draft_paths(ctypes.byref(struct))
    if count < 0:
        return None
    return list(zip(parents[:count].tolist(), tokens[:count].tolist(), chances[:count].tolist(), strict=True))


def path_kernel(
    token_ids: np.ndarray, correction: NonlinearCorrection | None, tables: Sequence[Tensor]
) -> PathKernel | None:
    """The kernel for a drafter on the CPU; None where it cannot be used."""
    rank = 0 if correction is None else correction.right.shape[1]
    if native.load_kernels() is None or rank % 16:
        return None
    return PathKernel(token_ids, correction, tuple(table.to(torch.bfloat16).contiguous() for table in tables))
