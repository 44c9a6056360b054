"""Find the likely tokens of many positions at once and grow draft paths of them, by compiled kernels where possible."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from saltus.core.coupling import PARALLEL_ERROR
from saltus.core.sampling import float_row
from saltus.drafting.draft_tree import (
    MAX_CANDIDATES,
    MAX_GAP,
    MAX_NODES,
    MIN_PATH_PROBABILITY,
    Chooser,
    Coupled,
    Likeliest,
    LikelyTokens,
    PathNode,
    likely_tokens,
)
from saltus.drafting.token_correction import NonlinearCorrection
from saltus.networks.models.exact import native


@dataclass(frozen=True, eq=False)
class RowCandidates:
    """The likely tokens of several positions, as the kernels read and write them."""

    columns: Int[np.ndarray, "positions candidates"]  # int32
    logits: Float[np.ndarray, "positions candidates"]
    counts: Int[np.ndarray, "positions"]
    rests: Float[np.ndarray, "positions"]

    def likely_tokens(self) -> list[LikelyTokens]:
        """The same, position by position."""
        return [
            LikelyTokens(self.columns[row, :count].astype(np.int64), self.logits[row, :count], float(self.rests[row]))
            for row, count in enumerate(self.counts.tolist())
        ]


def row_candidates(logits: Float[Tensor, "positions vocab"]) -> RowCandidates | None:
    """The likely tokens of each row; None where there is no kernel."""
    kernel = native.kernel("near_greatest", logits.dtype, logits.device)
    if kernel is None:
        return None
    logits = logits.contiguous()
    rows, vocab = logits.shape
    found = RowCandidates(
        np.empty((rows, MAX_CANDIDATES), dtype=np.int32),
        np.empty((rows, MAX_CANDIDATES), dtype=np.float32),
        np.empty(rows, dtype=np.int64),
        np.empty(rows, dtype=np.float32),
    )
    struct = native.NearGreatest(
        x=logits.data_ptr(), places=found.columns.ctypes.data, values=found.logits.ctypes.data,
        counts=found.counts.ctypes.data, rests=found.rests.ctypes.data,
        rows=rows, size=vocab, most=MAX_CANDIDATES, gap=MAX_GAP,
    )  # fmt: skip
    kernel(ctypes.byref(struct))
    return found


def rows_likely_tokens(logits: Float[Tensor, "positions vocab"]) -> list[LikelyTokens]:
    """`likely_tokens` of each row."""
    found = row_candidates(logits)
    return [likely_tokens(row) for row in float_row(logits)] if found is None else found.likely_tokens()


@dataclass(frozen=True, eq=False)
class PathKernel:
    """`grown_nodes` by a compiled kernel, for the drafted tokens `token_ids` and their correction."""

    token_ids: Int[np.ndarray, "vocab"]
    correction: NonlinearCorrection | None
    tables: tuple[Tensor, ...] = ()  # of the drafted tokens, bfloat16 [vocab, rank]: right, A·e and B·e

    def __call__(
        self, found: RowCandidates, states: np.ndarray, text: Sequence[int], choose: Chooser
    ) -> list[PathNode] | None:
        """The nodes; None for a chooser that the kernel does not know. `states` are the correction's inputs."""
        kernels = native.load_kernels()
        if kernels is None or not isinstance(choose, Likeliest | Coupled):
            return None
        if isinstance(choose, Coupled) and not choose.is_race:
            return None
        parents, tokens, chances = (np.empty(MAX_NODES, dtype=each) for each in (np.int64, np.int64, np.float32))
        struct = native.DraftPaths(
            columns=found.columns.ctypes.data, logits=found.logits.ctypes.data, counts=found.counts.ctypes.data,
            rests=found.rests.ctypes.data, ids=self.token_ids.ctypes.data, positions=len(found.counts),
            choices=choose.choices, nodes=MAX_NODES, least=MIN_PATH_PROBABILITY, error=PARALLEL_ERROR,
            parents=parents.ctypes.data, tokens=tokens.ctypes.data, chances=chances.ctypes.data,
        )  # fmt: skip
        kept: list[np.ndarray] = []  # what the struct points to
        if isinstance(choose, Coupled):
            kept.append(np.stack([choose.noise.token_keys("text", at) for at in choose.positions[: len(found.counts)]]))
            struct.keys, struct.temperature = kept[0].ctypes.data, choose.sampling.temperature
        else:
            struct.temperature = choose.temperature
        if self.correction is not None:
            struct.rank, struct.states = states.shape[1], states.ctypes.data
            struct.right, struct.left, struct.second_left = (table.data_ptr() for table in self.tables)
            vectors = [self.correction.token_vectors_of(token) for token in text]
            if vectors:
                struct.text_left, struct.text_second_left = (vector.ctypes.data for vector in vectors[-1])
            if len(vectors) > 1:
                struct.text_before = vectors[-2][1].ctypes.data
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
