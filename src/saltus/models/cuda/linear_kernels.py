"""Multiply rows by weights, so that a row's sums do not depend on how many rows there are.

Weights are the left operand and rows the right one: out[n, m] = Σ_k w[n, k] x[m, k]. Tiles cut N and K by the layer's
own sizes. Calls of few and of many rows differ in the width of a tile only, along which a matrix instruction adds
nothing. K is cut into parts for small layers, which would otherwise fill few processors; whoever reads the parts adds
them in their order.
"""

# Triton's own types differ between its releases, and say of `range` in a kernel that nothing comes back.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from saltus.models.cuda.launching import device_function, kernel, pipeline_bytes, power_of_two
from saltus.models.cuda.packed_kernels import packed_linear, with_biases
from saltus.models.cuda.packed_weight import GPUPackedWeight

MIN_TILE_ROWS, MAX_TILE_ROWS = 16, 128
PROGRAMS = 132  # that a product should have, where its sizes allow: the processors of a large GPU
PROGRAMS_OF_PACKED = 4 * PROGRAMS  # which have half the warps, whose time is spent on putting numbers together
MIN_STEPS = 3  # of BLOCK_K columns, in each part of a sum


class Blocks(NamedTuple):
    """How a product is cut; it follows from the layer's sizes alone."""

    columns: int  # BLOCK_N
    depth: int  # BLOCK_K
    parts: int = 1  # of the sums over K
    warps: int = 4
    stages: int = 4  # of the pipeline, at most: they change no sums


def blocks_of(*weights: Tensor, parts: bool = True) -> Blocks:
    """How to cut a product with weights [outputs, inputs] of the same inputs; without `parts` its sums are whole."""
    outputs, inputs = sum(map(len, weights)), weights[0].shape[1]
    depth = 128 if inputs % 128 == 0 else 64
    tiles, steps = -(-outputs // 64), -(-inputs // depth)
    programs = PROGRAMS_OF_PACKED if isinstance(weights[0], GPUPackedWeight) else PROGRAMS
    count = max(1, min(round(programs / tiles), steps // MIN_STEPS)) if parts else 1
    return Blocks(64, depth, count, stages=4 if count > 1 else 5)


def tile_rows(rows: int) -> int:
    """Rows of a tile: the width of the matrix instructions, which does not change sums."""
    return min(MAX_TILE_ROWS, max(MIN_TILE_ROWS, power_of_two(rows)))


def padded_rows(rows: int) -> int:
    """The rows of a buffer for so many rows: whole tiles."""
    return -(-rows // tile_rows(rows)) * tile_rows(rows)


@kernel("num_rows")
def _linear(
    x, weight, bias, out, num_rows,
    N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr,
    BIASED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out[part, row, FIRST + n]: the part's sums, with the bias in the first one, in the dtype of `out`."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part, rows = tl.program_id(1), tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    depth = tl.arange(0, BLOCK_K)
    inside = columns < N
    weights = weight + columns[:, None].to(tl.int64) * K + depth[None, :]
    inputs = x + rows[None, :] * K + depth[:, None]
    sums = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    per_part: tl.constexpr = (steps + PARTS - 1) // PARTS
    for step in tl.range(0, per_part):
        start = (part * per_part + step) * BLOCK_K
        if N % BLOCK_N == 0 and steps % PARTS == 0:
            w, row = tl.load(weights + start), tl.load(inputs + start)
        else:  # the last part may be shorter; zeros add nothing
            exists = start + depth < K
            w = tl.load(weights + start, mask=inside[:, None] & exists[None, :], other=0.0)
            row = tl.load(inputs + start, mask=exists[:, None], other=0.0)
        sums = tl.dot(w, row, sums, input_precision="ieee")
    sums = with_biases(sums, bias, columns, columns < tl.where(part == 0, N, 0), BIASED)
    place = (part.to(tl.int64) * num_rows + rows[None, :]) * WIDTH + FIRST + columns[:, None]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside[:, None] & (rows[None, :] < num_rows))


@device_function
def _active(gated, ACTIVATION: tl.constexpr):
    """SiLU; GELU, or that by tanh: x · sigmoid(2 u) with u = √(2 / π) (x + 0.044715 x³); in float32."""
    if ACTIVATION == "gelu":
        return gated * 0.5 * (1.0 + tl.erf(gated * 0.7071067811865476))
    inner = gated
    if ACTIVATION == "gelu_tanh":
        inner = 1.5957691216057308 * (gated + 0.044715 * gated * gated * gated)
    return gated / (1.0 + tl.exp(-inner))


@kernel("limit", "alpha")
def _activate(
    both, out, numbers, limit, alpha,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """out[row, n] = active(gate) · up, or active(gate) alone, rounded as Transformers rounds it; see `activate`."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    dtype = out.dtype.element_ty
    first, second = at, SIZE + at
    if INTERLEAVED:
        first, second = 2 * at, 2 * at + 1
    width: tl.constexpr = 2 * SIZE if GATED else SIZE  # pyright: ignore[reportAssignmentType]
    gate = tl.load(both + row * width + first, mask=inside, other=0.0).to(tl.float32)
    up = gate
    if GATED:
        up = tl.load(both + row * width + second, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, limit).to(dtype).to(tl.float32)
        up = tl.minimum(tl.maximum(up, -limit), limit).to(dtype).to(tl.float32)
        up = (up + 1.0).to(dtype).to(tl.float32)
        share = 1.0 / (1.0 + tl.exp(-(gate * alpha).to(dtype).to(tl.float32)))
        active = gate * share.to(dtype).to(tl.float32)
    elif ACTIVATION == "relu":
        active = tl.maximum(gate, 0.0)
    elif ACTIVATION == "relu_squared":
        active = tl.maximum(gate, 0.0) * tl.maximum(gate, 0.0)
    elif ACTIVATION == "xielu":  # Huang & Schlag 2024
        rest = tl.load(numbers + 1) * (tl.exp(tl.minimum(gate, tl.load(numbers + 3))) - 1.0 - gate)
        active = tl.where(gate > 0, tl.load(numbers) * gate * gate, rest) + tl.load(numbers + 2) * gate
    else:
        active = _active(gate, ACTIVATION)
    if GATED:
        active = active.to(dtype).to(tl.float32) * up
    tl.store(out + row * SIZE + at, active.to(dtype), mask=inside)


@kernel("num_rows")
def _gate_and_up(
    x, gate, up, bias, out, num_rows,
    N: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr, BIASED: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out[row, n] = active(gate[n] · x[row]) · (up[n] · x[row]), rounded as Transformers rounds it.

    There may be biases of all gates, then of all others.
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows, depth = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    inside = columns < N
    place = columns[:, None].to(tl.int64) * K + depth[None, :]
    inputs = x + rows[None, :] * K + depth[:, None]
    gated = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    raised = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        row = tl.load(inputs + start)
        if N % BLOCK_N == 0:
            g, u = tl.load(gate + place + start), tl.load(up + place + start)
        else:
            g = tl.load(gate + place + start, mask=inside[:, None], other=0.0)
            u = tl.load(up + place + start, mask=inside[:, None], other=0.0)
        gated = tl.dot(g, row, gated, input_precision="ieee")
        raised = tl.dot(u, row, raised, input_precision="ieee")
    gated = with_biases(gated, bias, columns, inside, BIASED)
    raised = with_biases(raised, bias, N + columns, inside, BIASED)
    dtype = out.dtype.element_ty
    gated = gated.to(dtype).to(tl.float32)
    active = _active(gated, ACTIVATION).to(dtype).to(tl.float32)
    product = (active * raised.to(dtype).to(tl.float32)).to(dtype)
    at = rows[None, :].to(tl.int64) * N + columns[:, None]
    tl.store(out + at, product, mask=inside[:, None] & (rows[None, :] < num_rows))


def linear(
    x: Tensor, weights: Sequence[Tensor], out: Tensor, blocks: Blocks, rows: int, first: int = 0,
    bias: Tensor | None = None,
) -> None:  # fmt: skip
    """out [parts, rows, N] or [rows, N] of x [padded rows, K] and weights of N outputs together, each [.., K].

    A bias [N] is added in the first part. Rows after `rows` are not written, nor columns before `first` and after those
    of the weights.
    """
    wide, width, begin = tile_rows(rows), out.shape[-1], first
    for weight in weights:
        outputs, inputs = weight.shape
        added = None if bias is None else bias[first - begin :]
        if isinstance(weight, GPUPackedWeight):
            packed_linear(x, weight, out, added, tile_rows=wide, parts=blocks.parts, rows=rows, first=first)
        else:
            grid = -(-outputs // blocks.columns), blocks.parts, -(-rows // wide)
            sizes = {"N": outputs, "K": inputs, "PARTS": blocks.parts, "FIRST": first, "WIDTH": width, "ROWS": wide}
            given = x if added is None else added  # a pointer that is not read
            _launch(_linear, grid, blocks, 1, x, weight, given, out, rows, BIASED=added is not None, **sizes)
        first += outputs


def linear_parts(x: Tensor, weights: Sequence[Tensor], blocks: Blocks, rows: int, bias: Tensor | None = None) -> Tensor:
    """The parts of a product in float32, [parts, rows, N]; see `linear`."""
    parts = x.new_empty(blocks.parts, rows, sum(map(len, weights)), dtype=torch.float32)
    linear(x, weights, parts, blocks, rows, bias=bias)
    return parts


def product(x: Tensor, weight: Tensor, rows: int, bias: Tensor | None = None) -> Tensor:
    """The first rows of x [.., K] times a weight [N, K], and a bias [N].

    Tiles may read beyond them: x is copied if it ends before.
    """
    wide = padded_rows(rows)
    if len(x) < wide:
        x = torch.cat([x[:rows], x.new_zeros(wide - rows, x.shape[1])])
    out = x.new_empty(rows, len(weight))
    linear(x, [weight], out, blocks_of(weight, parts=False), rows, bias=bias)
    return out


def gate_and_up(
    x: Tensor, weights: Sequence[Tensor], out: Tensor, blocks: Blocks, rows: int, activation: str = "silu",
    bias: Tensor | None = None,
) -> None:  # fmt: skip
    """out [rows, N], what the MLP's last layer reads, of x [padded rows, K] and the weights [N, K] of gate and up.

    They may have a bias [2 N], the gate's first. Those of packed weights may be joined. The activation is one that
    `_active` knows.
    """
    if any(isinstance(weight, GPUPackedWeight) for weight in weights):
        both = x.new_empty(rows, 2 * out.shape[1])
        linear(x, weights, both, blocks, rows, bias=bias)
        activate(both, out, activation)
        return
    gate, up = weights
    (outputs, inputs), wide = gate.shape, tile_rows(rows)
    grid = -(-outputs // blocks.columns), -(-rows // wide)
    sizes = {"N": outputs, "K": inputs, "ACTIVATION": activation, "BIASED": bias is not None, "ROWS": wide}
    _launch(_gate_and_up, grid, blocks, 2, x, gate, up, x if bias is None else bias, out, rows, **sizes)


def activate(
    both: Tensor,
    out: Tensor,
    activation: str = "silu",
    interleaved: bool = False,
    limit: float = 0.0,
    alpha: float = 0.0,
    numbers: Tensor | None = None,
) -> None:
    """out [rows, N] of the products [rows, 2 N] with gate and up, perhaps in turns, or [rows, N] without a gate.

    The activation is one that `_active` knows, or relu, relu_squared, clamped_swiglu (see `Experts`) or xielu, which
    has `numbers` [4] in float32: of x², of eˣ − 1 − x and of x, and the most that x is in eˣ.
    """
    size, block = out.shape[1], 1024
    _activate[(len(both), -(-size // block))](
        both, out, both if numbers is None else numbers, limit, alpha,
        SIZE=size, BLOCK=block, ACTIVATION=activation, GATED=both.shape[1] == 2 * size,
        INTERLEAVED=interleaved, num_warps=4,
    )  # fmt: skip


def _launch(
    run: Any, grid: tuple[int, ...], blocks: Blocks, weights: int, x: Tensor, *args: Any, **constants: Any
) -> None:
    """Start a kernel that reads tiles of `weights` weights and of x, in a pipeline as deep as shared memory allows."""
    stage = (weights * blocks.columns + constants["ROWS"]) * blocks.depth * x.element_size()
    stages = max(1, min(blocks.stages, pipeline_bytes(x.device) // stage))
    tile = {"BLOCK_N": blocks.columns, "BLOCK_K": blocks.depth}
    run[grid](x, *args, **constants, **tile, num_warps=blocks.warps, num_stages=stages)
