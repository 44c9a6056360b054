"""Grow an any-subset model's draft paths by a compiled kernel: `grown_nodes` for `HolePredictions`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from saltus.kernels import native
from saltus.kernels.native import structs
from saltus.methods.assd.hole_predictions import HolePredictions
from saltus.methods.shared.draft_tree import Chooser, PathNode
from saltus.methods.shared.logit_correction import PairwiseCorrection
from saltus.methods.shared.row_candidates import grow_natively, supports_chooser

MOST_LANES = 16  # the kernel's ranks are multiples of it
RUN = 64  # tokens whose rows of `right` lie together: RUN of draft_paths.c


@dataclass(frozen=True, eq=False)
class HolePathKernel:
    """The kernel, for one model's correction."""

    left: Tensor  # bfloat16 [vocab, rank]
    second_left: Tensor  # the same
    right: Tensor  # bfloat16 [vocab / RUN, rank, RUN], padded with zeros
    gate: np.ndarray  # float32 [hidden, rank]
    sharpness: np.ndarray  # float32 [hidden]

    def __call__(self, predictions: HolePredictions, text: Sequence[int], choose: Chooser) -> list[PathNode] | None:
        """The nodes; None for a chooser or logits that the kernel does not know."""
        holes = predictions.holes
        if not supports_chooser(choose):
            return None
        logits = [row_address(hole.outputs.logits, hole.row) for hole in holes]
        states = [row_address(hole.hidden_states, hole.row) for hole in holes]
        if None in logits or None in states:
            return None
        size = ctypes.c_void_p * len(holes)
        rows, inputs = size(*logits), size(*states)
        unknown = np.array(predictions.unknown, dtype=np.int64)
        last = np.array(sorted(predictions.last_tokens), dtype=np.int64)
        second, first = [-1, -1, *text][-2:]
        struct = structs.Holes(
            logits=ctypes.addressof(rows), states=ctypes.addressof(inputs), unknown=native.address(unknown),
            gate=native.address(self.gate), sharpness=native.address(self.sharpness), left=self.left.data_ptr(),
            second_left=self.second_left.data_ptr(), right=self.right.data_ptr(),
            banned=native.address(predictions.banned), last=native.address(last),
            vocab=holes[0].outputs.logits.shape[1], hidden=self.gate.shape[0],
            width=self.gate.shape[1], num_banned=len(predictions.banned), num_last=len(last), second=second,
            first=first,
        )  # fmt: skip
        return grow_natively(choose, len(holes), {"holes": ctypes.addressof(struct), "rank": self.left.shape[1]})


def row_address(table: Tensor | None, row: int) -> int | None:
    """Where a row of bfloat16 begins; 0 without a table, None if the kernel cannot read it."""
    if table is None:
        return 0
    if table.dtype != torch.bfloat16 or table.device.type != "cpu" or not table.is_contiguous():
        return None
    return table.data_ptr() + row * table.stride(0) * table.element_size()


def with_kernel(correction: PairwiseCorrection) -> PairwiseCorrection:
    """The correction with the kernel, if its rank is one that the kernel knows."""
    rank = correction.left.shape[1]
    if rank % MOST_LANES:
        return correction
    left, second_left, right = (torch.from_numpy(table).bfloat16() for table in correction.tables[:3])
    right = torch.nn.functional.pad(right, (0, 0, 0, -len(right) % RUN)).view(-1, RUN, rank)
    gate = np.ascontiguousarray(correction.gate, dtype=np.float32)
    kernel = HolePathKernel(
        left.contiguous(), second_left.contiguous(), right.transpose(1, 2).contiguous(),
        np.ascontiguousarray(gate[:, :-1]), np.ascontiguousarray(gate[:, -1]),
    )  # fmt: skip
    return replace(correction, grow=kernel)
