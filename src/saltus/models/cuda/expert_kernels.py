"""Multiply rows by the experts that they choose, so that a row's sums depend on no other row.

A pair is a row and one of its experts. Pairs are sorted by expert, and each program multiplies all pairs of one expert,
tile by tile; in calls of a fixed shape nothing waits for the device, so that they can be captured as graphs. A row has
the same sums at any place of a tile and in any tile (linear_kernels.py).
"""

# Triton's own types differ between its releases, and say of `range` in a kernel that nothing comes back.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from saltus.models.cuda.launching import device_function, kernel, pipeline_bytes, power_of_two
from saltus.models.cuda.linear_kernels import blocks_of, tile_rows
from saltus.models.cuda.packed_kernels import launch_facts, packed_sums, with_biases
from saltus.models.cuda.packed_weight import GPUPackedWeight

MAX_TILE_ROWS = 64
SCANNED = 1024  # pairs at once


class SortedPairs(NamedTuple):
    """The pairs [rows · chosen] of a call, by expert; pair p belongs to row p // chosen."""

    order: Tensor  # int32 [pairs] the pairs of the first expert, those of the second …
    starts: Tensor  # int32 [experts + 1] where those of an expert begin in `order`, and their number
    chosen: int  # experts of a row
    tile_rows: int

    @classmethod
    def of(cls, experts: Tensor, count: int, rows_of_expert: int | None = None) -> SortedPairs:
        """Of the experts [rows, chosen] of each row, out of `count`; the number `count` belongs to none.

        An expert has at most `rows_of_expert` pairs, without it one of each row.
        """
        pairs = experts.numel()
        order = torch.zeros(pairs, dtype=torch.int32, device=experts.device)
        starts = torch.empty(count + 1, dtype=torch.int32, device=experts.device)
        block = min(SCANNED, power_of_two(pairs))
        _sort_pairs[(count,)](experts.contiguous(), order, starts, pairs, EXPERTS=count, BLOCK=block, num_warps=4)
        return cls(order, starts, experts.shape[1], min(MAX_TILE_ROWS, tile_rows(rows_of_expert or len(experts))))


@kernel("num_pairs")
def _sort_pairs(experts, order, starts, num_pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Each program lists the pairs of one expert, in their order, after those of smaller ones."""
    expert, at = tl.program_id(0), tl.arange(0, BLOCK)
    first = 0
    for start in tl.range(0, num_pairs, BLOCK):
        found = tl.load(experts + start + at, mask=start + at < num_pairs, other=EXPERTS).to(tl.int32)
        first += tl.sum((found < expert).to(tl.int32), 0)
    tl.store(starts + expert, first)
    for start in tl.range(0, num_pairs, BLOCK):
        found = tl.load(experts + start + at, mask=start + at < num_pairs, other=EXPERTS).to(tl.int32)
        own = (found == expert).to(tl.int32)
        tl.store(order + first + tl.cumsum(own, 0) - 1, start + at, mask=own != 0)
        first += tl.sum(own, 0)
    tl.store(starts + EXPERTS, first, mask=expert == EXPERTS - 1)


@device_function
def _pairs_of_tile(order, first, end, CHOSEN: tl.constexpr, ROWS: tl.constexpr):
    """The pairs of a tile, the rows of x that they read, and which of them exist."""
    at = first + tl.arange(0, ROWS)
    inside = at < end
    pairs = tl.load(order + at, mask=inside, other=0)
    return pairs, pairs // CHOSEN, inside


@kernel()
def _expert_linear(
    x, stack, biases, out, order, starts,
    N: tl.constexpr, K: tl.constexpr, STRIDE_N: tl.constexpr, STRIDE_K: tl.constexpr, CHOSEN: tl.constexpr,
    BIASED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out[pair, n] = stack[expert, n] · x[pair // CHOSEN] + biases[expert, n], of all pairs of an expert."""
    columns, expert = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1)
    depth, inside = tl.arange(0, BLOCK_K), columns < N
    matrix = stack + expert.to(tl.int64) * N * K
    weights = matrix + columns[:, None].to(tl.int64) * STRIDE_N + depth[None, :].to(tl.int64) * STRIDE_K
    end = tl.load(starts + expert + 1)
    for first in tl.range(tl.load(starts + expert), end, ROWS):
        pairs, rows, exists = _pairs_of_tile(order, first, end, CHOSEN, ROWS)
        inputs = x + rows[None, :].to(tl.int64) * K + depth[:, None]
        sums = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
        for start in tl.range(0, K, BLOCK_K):
            left = start + depth < K
            w = tl.load(weights + start * STRIDE_K, mask=inside[:, None] & left[None, :], other=0.0)
            row = tl.load(inputs + start, mask=exists[None, :] & left[:, None], other=0.0)
            sums = tl.dot(w, row, sums, input_precision="ieee")
        sums = with_biases(sums, biases, expert * N + columns, inside, BIASED)
        to = out + pairs[None, :].to(tl.int64) * N + columns[:, None]
        tl.store(to, sums.to(out.dtype.element_ty), mask=inside[:, None] & exists[None, :])


@kernel()
def _packed_expert_linear(
    x, low, high, fine, coarse, biases, out, order, starts,
    N: tl.constexpr, STRIDE: tl.constexpr, K: tl.constexpr, CHOSEN: tl.constexpr, BIASED: tl.constexpr,
    BITS: tl.constexpr, ZERO: tl.constexpr, OF_256: tl.constexpr, MINIMUMS: tl.constexpr, HALVES: tl.constexpr,
    SCALES: tl.constexpr, SPAN: tl.constexpr, DIVISOR: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The same with a packed stack; N is a multiple of BLOCK_N, so that a tile of outputs belongs to one expert."""
    columns, expert = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1)
    whole = tl.full((), 0, tl.int64)  # the only part of a sum
    end = tl.load(starts + expert + 1)
    for first in tl.range(tl.load(starts + expert), end, ROWS):
        pairs, rows, exists = _pairs_of_tile(order, first, end, CHOSEN, ROWS)
        inputs = x + rows[None, :].to(tl.int64) * K + tl.arange(0, LANES)[:, None]
        sums = packed_sums(
            inputs, exists[None, :], low, high, fine, coarse, expert * N + columns, whole,
            STRIDE, K, 1, BITS, ZERO, OF_256, MINIMUMS, HALVES, SCALES, SPAN, DIVISOR, True, LANES, STEP,
        )  # fmt: skip
        sums = with_biases(sums, biases, expert * N + columns, columns < N, BIASED)
        to = out + pairs[None, :].to(tl.int64) * N + columns[:, None]
        tl.store(to, sums.to(out.dtype.element_ty), mask=exists[None, :])


@kernel("num_rows")
def _sum_experts(
    outputs, weights, shared, gate, out, num_rows,
    SIZE: tl.constexpr, CHOSEN: tl.constexpr, SHARED: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[row, n] = Σ_e weights[row, e] · outputs[row, e, n], in the order of e.

    With SHARED parts the sum is rounded, and theirs added, rounded, times the rounded sigmoid of the sum of GATE parts.
    """
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    dtype = outputs.dtype.element_ty
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for each in tl.range(0, CHOSEN):
        part = tl.load(outputs + (row * CHOSEN + each) * SIZE + at, mask=inside, other=0.0).to(tl.float32)
        sums += part * tl.load(weights + row * CHOSEN + each).to(tl.float32)
    if SHARED > 0:
        own = tl.load(shared + row * SIZE + at, mask=inside, other=0.0)
        for part in tl.static_range(1, SHARED):
            own += tl.load(shared + (part * num_rows + row) * SIZE + at, mask=inside, other=0.0)
        own = own.to(dtype).to(tl.float32)
        if GATE > 0:
            logit = tl.load(gate + row)
            for part in tl.static_range(1, GATE):
                logit += tl.load(gate + part * num_rows + row)
            logit = logit.to(dtype).to(tl.float32)
            own = (own * (1.0 / (1.0 + tl.exp(-logit))).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        sums = sums.to(dtype).to(tl.float32) + own
    tl.store(out + row * SIZE + at, sums.to(out.dtype.element_ty), mask=inside)


def expert_product(
    x: Tensor, stack: Tensor, pairs: SortedPairs, is_transposed: bool = False, biases: Tensor | None = None
) -> Tensor:
    """[pairs, N] of x [rows, K], or [pairs, K], and a stack [experts, N, K], or [experts, K, N] if it is transposed.

    A packed stack is [experts, N, K] in either case. Biases [experts, N] are added before the sums are rounded. Pairs
    of no expert are not written.
    """
    chosen = 1 if len(x) == len(pairs.order) else pairs.chosen
    added = {"CHOSEN": chosen, "BIASED": biases is not None}
    biases = x if biases is None else biases.contiguous()  # a pointer that is not read
    if isinstance(stack, GPUPackedWeight):
        experts, outputs, _ = stack.shape
        out = x.new_empty(len(pairs.order), outputs)
        planes, facts = launch_facts(x, stack, pairs.tile_rows)
        _packed_expert_linear[(outputs // facts["BLOCK_N"], experts)](
            x, *planes, biases, out, pairs.order, pairs.starts, N=outputs, **added, **facts
        )
        return out
    matrices = stack.mT if is_transposed else stack
    experts, outputs, inputs = matrices.shape
    blocks, out = blocks_of(matrices[0], parts=False), x.new_empty(len(pairs.order), outputs)
    stage = (blocks.columns + pairs.tile_rows) * blocks.depth * x.element_size()
    _expert_linear[(-(-outputs // blocks.columns), experts)](
        x, stack, biases, out, pairs.order, pairs.starts,
        N=outputs, K=inputs, STRIDE_N=matrices.stride(1), STRIDE_K=matrices.stride(2), **added,
        BLOCK_N=blocks.columns, BLOCK_K=blocks.depth, ROWS=pairs.tile_rows,
        num_warps=blocks.warps, num_stages=max(1, min(blocks.stages, pipeline_bytes(x.device) // stage)),
    )  # fmt: skip
    return out


def sum_experts(
    outputs: Tensor,
    weights: Tensor,
    dtype: torch.dtype | None = None,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """[rows, N] of outputs [pairs, N] and weights [rows, chosen], in their dtype if none is given.

    The sum of the parts `shared` [parts, rows, N] of a shared expert is added, times the sigmoid of that of the parts
    `gate` [parts, rows, 1]; each is rounded to the dtype of `outputs`, the experts' own sum, too.
    """
    (rows, chosen), size, block = weights.shape, outputs.shape[1], 1024
    out = outputs.new_empty(rows, size, dtype=dtype)
    parts = [outputs if each is None else each for each in (shared, gate)]  # pointers that are not read
    _sum_experts[(rows, -(-size // block))](
        outputs, weights.contiguous(), *parts, out, rows, SIZE=size, CHOSEN=chosen,
        SHARED=0 if shared is None else len(shared), GATE=0 if gate is None else len(gate), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out
