"""Latent attention's own kernels: norms and rotation of what is kept, and products with each head's matrix."""

# Triton's own types differ between its releases, and say of `range` in a kernel that nothing comes back.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton.language as tl
from torch import Tensor

from saltus.models.cuda.launching import kernel, largest_power_of_two, power_of_two, rounded_product
from saltus.models.cuda.linear_kernels import tile_rows
from saltus.models.cuda.row_kernels import AngleTable, normed_row, rounds_once, summed_columns

BLOCK_N, MAX_BLOCK_K = 64, 64  # of a head's product


@kernel("num_rows", "epsilon")
def _norm_columns(
    parts, bias, weight, slots, out, num_rows, epsilon,
    FIRST: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
    PARTS: tl.constexpr, BIASED: tl.constexpr, TO_SLOTS: tl.constexpr, ROUNDS_ONCE: tl.constexpr,
):  # fmt: skip
    """The norm of SIZE columns of a row's summed parts, from FIRST on, to its place in `out`, or to that of its slot.

    Places are STEP numbers apart.
    """
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside = at < SIZE
    dtype: tl.constexpr = out.dtype.element_ty
    x = summed_columns(parts, bias, row, FIRST + at, inside, num_rows, WIDTH, PARTS, BIASED, dtype)
    factors = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    x = normed_row(x, factors, epsilon, inside, SIZE, ROUNDS_ONCE, False, dtype)
    place = row
    if TO_SLOTS:
        place = tl.load(slots + row).to(tl.int64)
    tl.store(out + place * STEP + at, x.to(dtype), mask=inside)


@kernel("num_rows")
def _rotate_latent(
    made, parts, bias, query_cosines, query_sines, growth, key_cosines, key_sines, positions, slots, queries, keys,
    num_rows,
    HEADS: tl.constexpr, LATENT: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr,
    PARTS: tl.constexpr, BIASED: tl.constexpr, PADDED: tl.constexpr, PADDED_NOPE: tl.constexpr,
    INTERLEAVED: tl.constexpr, GROWS: tl.constexpr, ROUNDS_ONCE: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """One head of one row: rotate the last ROPE dimensions of its query; after all heads: those of the row's key.

    Without ROTATED they are copied.

    `made` has the queries [rows, HEADS, NOPE + ROPE], the last columns of parts the key; both go to places after LATENT
    numbers. GROWS: the first NOPE dimensions of queries are multiplied by a number of the position, where they are.
    ROUNDS_ONCE: sums are rounded, and not their products.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = ROPE // 2
    dtype: tl.constexpr = queries.dtype.element_ty
    at = tl.arange(0, PADDED)
    exists = at < half
    at_first, at_second = at, at + half  # of each pair
    if INTERLEAVED:
        at_first, at_second = 2 * at, 2 * at + 1
    position = tl.load(positions + row)
    if head < HEADS:
        query = made + (row * HEADS + head) * (NOPE + ROPE)
        first = tl.load(query + NOPE + at_first, mask=exists, other=0.0).to(tl.float32)
        second = tl.load(query + NOPE + at_second, mask=exists, other=0.0).to(tl.float32)
        cosines, sines = query_cosines, query_sines
        to = queries + (row * HEADS + head) * (LATENT + ROPE) + LATENT
        if GROWS:
            other = tl.arange(0, PADDED_NOPE)
            grown = tl.load(query + other, mask=other < NOPE, other=0.0).to(tl.float32)
            grown *= tl.load(growth + position).to(tl.float32)
            tl.store(query + other, grown.to(dtype), mask=other < NOPE)
    else:
        column = WIDTH - ROPE
        first = summed_columns(parts, bias, row, column + at_first, exists, num_rows, WIDTH, PARTS, BIASED, dtype)
        second = summed_columns(parts, bias, row, column + at_second, exists, num_rows, WIDTH, PARTS, BIASED, dtype)
        cosines, sines = key_cosines, key_sines
        to = keys + tl.load(slots + row) * (LATENT + ROPE) + LATENT
    left, right = first, second
    if ROTATED:
        cos = tl.load(cosines + position * ROPE + at, mask=exists, other=0.0).to(tl.float32)
        sin = tl.load(sines + position * ROPE + at, mask=exists, other=0.0).to(tl.float32)
        if ROUNDS_ONCE:
            left, right = first * cos - second * sin, second * cos + first * sin
        else:
            left = rounded_product(first, cos).to(dtype).to(tl.float32)
            left += rounded_product(-second, sin).to(dtype).to(tl.float32)
            right = rounded_product(second, cos).to(dtype).to(tl.float32)
            right += rounded_product(first, sin).to(dtype).to(tl.float32)
    tl.store(to + at_first, left.to(dtype), mask=exists)
    tl.store(to + at_second, right.to(dtype), mask=exists)


@kernel("num_rows")
def _per_head_linear(
    x, weight, out, num_rows,
    N: tl.constexpr, K: tl.constexpr, X_ROW: tl.constexpr, X_HEAD: tl.constexpr, WEIGHT_HEAD: tl.constexpr,
    WEIGHT_N: tl.constexpr, WEIGHT_K: tl.constexpr, OUT_ROW: tl.constexpr, OUT_HEAD: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out[row, head, n] = Σ weight[head, n, k] x[row, head, k]; the numbers of steps in memory are constants."""
    columns, head = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1)
    rows, depth = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    inside = columns < N
    weights = weight + head.to(tl.int64) * WEIGHT_HEAD + columns[:, None] * WEIGHT_N + depth[None, :] * WEIGHT_K
    inputs = x + rows[None, :].to(tl.int64) * X_ROW + head * X_HEAD + depth[:, None]
    sums = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        w = tl.load(weights + start * WEIGHT_K, mask=inside[:, None], other=0.0)
        sums = tl.dot(w, tl.load(inputs + start), sums, input_precision="ieee")
    place = rows[None, :].to(tl.int64) * OUT_ROW + head * OUT_HEAD + columns[:, None]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside[:, None] & (rows[None, :] < num_rows))


def norm_columns(
    parts: Tensor, bias: Tensor | None, first: int, norm: Any, out: Tensor, slots: Tensor | None = None
) -> None:
    """Rows of out [.., size, or wider] become the norm of as many columns of parts [parts, rows, width] as it has
    weights, from `first` on; with `slots` [rows] those are the rows."""
    count, rows, width = parts.shape
    size = len(norm.weight)
    _norm_columns[(rows,)](
        parts, parts if bias is None else bias, norm.weight, parts if slots is None else slots, out, rows,
        norm.variance_epsilon, FIRST=first, SIZE=size, PADDED=power_of_two(size), WIDTH=width, STEP=out.stride(0),
        PARTS=count, BIASED=bias is not None, TO_SLOTS=slots is not None, ROUNDS_ONCE=rounds_once(norm), num_warps=4,
    )  # fmt: skip


def rotate(
    made: Tensor, parts: Tensor, bias: Tensor | None, angles: Sequence[AngleTable], positions: Tensor, slots: Tensor,
    queries: Tensor, keys: Tensor, rope: int,
) -> None:  # fmt: skip
    """The last `rope` dimensions of queries [rows, heads, latent + rope] and, at slots, of keys [slots, 1, the same].

    They are the last ones of `made` [rows, heads, nope + rope], and the last columns of parts [parts, rows, width],
    rotated by the angles of queries and of keys if there are any. Where those of queries grow, the other dimensions of
    `made` are multiplied, too.
    """
    unused = parts  # a pointer that is not read
    of_queries, of_keys = angles or [AngleTable(unused, unused)] * 2
    count, rows, width = parts.shape
    _, heads, size = made.shape
    growth = of_queries.growth
    _rotate_latent[(rows, heads + 1)](
        made, parts, unused if bias is None else bias, of_queries.cosines, of_queries.sines,
        unused if growth is None else growth, of_keys.cosines, of_keys.sines, positions, slots, queries, keys, rows,
        HEADS=heads, LATENT=queries.shape[2] - rope, NOPE=size - rope, ROPE=rope, WIDTH=width, PARTS=count,
        BIASED=bias is not None, PADDED=power_of_two(rope // 2), PADDED_NOPE=power_of_two(size - rope),
        INTERLEAVED=of_keys.interleaved, GROWS=growth is not None,
        ROUNDS_ONCE=of_keys.cosines.dtype != queries.dtype, ROTATED=bool(angles), num_warps=1,
    )  # fmt: skip


def per_head(x: Tensor, weight: Tensor, out: Tensor, rows: int) -> None:
    """out [.., heads, N] = x [padded rows, heads, K] times each head's matrix of weight [heads, N, K], of `rows` rows.

    All may be parts of wider tensors; K is a multiple of 16.
    """
    heads, outputs, inputs = weight.shape
    wide, depth = tile_rows(rows), min(MAX_BLOCK_K, largest_power_of_two(inputs))
    assert x.stride(2) == out.stride(2) == 1
    _per_head_linear[(-(-outputs // BLOCK_N), heads, -(-rows // wide))](
        x, weight, out, rows, N=outputs, K=inputs, X_ROW=x.stride(0), X_HEAD=x.stride(1), WEIGHT_HEAD=weight.stride(0),
        WEIGHT_N=weight.stride(1), WEIGHT_K=weight.stride(2), OUT_ROW=out.stride(0), OUT_HEAD=out.stride(1),
        BLOCK_N=BLOCK_N, BLOCK_K=depth, ROWS=wide, num_warps=4,
    )  # fmt: skip
