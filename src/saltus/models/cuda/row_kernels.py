"""What is computed for each row alone: norms, sums of parts, rotary position embeddings."""

# Triton's own types differ between its releases, and say of `range` in a kernel that nothing comes back.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from saltus.models.cuda.launching import kernel, power_of_two


@kernel("num_rows", "epsilon")
def _add_and_norm(
    parts, hidden, weight, out, num_rows, epsilon,
    SIZE: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """hidden += Σ parts, in their order; out = weight · RMSNorm(hidden) (Zhang & Sennrich 2019)."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside = at < SIZE
    dtype = hidden.dtype.element_ty
    state = tl.load(hidden + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        total = tl.load(parts + row * SIZE + at, mask=inside, other=0.0)
        for part in tl.static_range(1, PARTS):
            total += tl.load(parts + (part * num_rows + row) * SIZE + at, mask=inside, other=0.0)
        state = (state + total.to(dtype).to(tl.float32)).to(dtype)
        tl.store(hidden + row * SIZE + at, state, mask=inside)
        state = state.to(tl.float32)
    normed = state * tl.rsqrt(tl.sum(state * state, 0) / SIZE + epsilon)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + at, scale * normed.to(dtype).to(tl.float32), mask=inside)


@kernel("num_rows", "epsilon")
def _rotate_and_store(
    parts, bias, query_norm, key_norm, cosines, sines, positions, slots, queries, keys, values, num_rows, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, BIASED: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    """One head of one row: sum its parts, rotate queries and keys (Su et al. 2021), write keys and values to slots."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    half: tl.constexpr = DIM // 2
    dtype = queries.dtype.element_ty
    at = tl.arange(0, half)
    place = head * DIM + at
    first = tl.load(parts + row * size + place)
    second = tl.load(parts + row * size + place + half)
    for part in tl.static_range(1, PARTS):
        first += tl.load(parts + (part * num_rows + row) * size + place)
        second += tl.load(parts + (part * num_rows + row) * size + place + half)
    if BIASED:
        first += tl.load(bias + place).to(tl.float32)
        second += tl.load(bias + place + half).to(tl.float32)
    first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    slot = tl.load(slots + row)
    if head >= HEADS + KV_HEADS:
        to = values + (slot * KV_HEADS + head - HEADS - KV_HEADS) * DIM
        tl.store(to + at, first.to(dtype))
        tl.store(to + half + at, second.to(dtype))
    else:
        if NORMED:
            norm = query_norm if head < HEADS else key_norm
            scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / DIM + epsilon)
            first = (tl.load(norm + at).to(tl.float32) * (first * scale).to(dtype).to(tl.float32)).to(dtype)
            second = (tl.load(norm + half + at).to(tl.float32) * (second * scale).to(dtype).to(tl.float32)).to(dtype)
            first, second = first.to(tl.float32), second.to(tl.float32)
        angle = tl.load(positions + row) * DIM + at
        cos, sin = tl.load(cosines + angle).to(tl.float32), tl.load(sines + angle).to(tl.float32)
        left = (first * cos).to(dtype).to(tl.float32) + (-second * sin).to(dtype).to(tl.float32)
        right = (second * cos).to(dtype).to(tl.float32) + (first * sin).to(dtype).to(tl.float32)
        if head < HEADS:  # noqa: SIM108  # pointers of two tensors
            to = queries + (row * HEADS + head) * DIM
        else:
            to = keys + (slot * KV_HEADS + head - HEADS) * DIM
        tl.store(to + at, left.to(dtype))
        tl.store(to + half + at, right.to(dtype))


def add_and_norm(parts: Tensor | None, hidden: Tensor, norm: Any, out: Tensor, rows: int) -> None:
    """hidden [rows, size] += the sum of parts [parts, rows, size], if there are any; `out` is its norm."""
    size = hidden.shape[1]
    _add_and_norm[(rows,)](
        hidden if parts is None else parts, hidden, norm.weight, out, rows, norm.variance_epsilon,
        SIZE=size, PADDED=power_of_two(size), PARTS=0 if parts is None else len(parts),
        num_warps=4 if size <= 2048 else 8,
    )  # fmt: skip


def rotate_and_store(
    parts: Tensor, bias: Tensor | None, norms: tuple[Any, Any] | None, angles: tuple[Tensor, Tensor],
    positions: Tensor, slots: Tensor, queries: Tensor, keys: Tensor, values: Tensor,
) -> None:  # fmt: skip
    """From parts [parts, rows, size] of a product with the weights of queries, keys and values.

    Queries [rows, heads, dim] are written, and a layer's keys and values [slots, kv_heads, dim] at the rows' slots.
    """
    heads, dim, kv_heads, rows = *queries.shape[1:], keys.shape[1], parts.shape[1]
    unused = queries  # a pointer that is not read
    query_norm, key_norm = (unused, unused) if norms is None else (each.weight for each in norms)
    _rotate_and_store[(rows, heads + 2 * kv_heads)](
        parts, unused if bias is None else bias, query_norm, key_norm, *angles, positions, slots, queries, keys, values,
        rows, 0.0 if norms is None else norms[0].variance_epsilon,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PARTS=len(parts), BIASED=bias is not None, NORMED=norms is not None,
        num_warps=1,
    )  # fmt: skip


def angle_tables(rotary: Any, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the first `count` positions, [count, dim] each, in the dtype of `like`."""
    positions = torch.arange(count, device=like.device)[None]
    cos, sin = rotary(like[None], position_ids=positions)
    return cos[0].contiguous(), sin[0].contiguous()
