"""What is computed for each row alone: norms, sums of parts, rotary position embeddings."""

# Triton's own types differ between its releases, and say of `range` in a kernel that nothing comes back.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from saltus.models.cuda.launching import device_function, kernel, power_of_two, rounded_product
from saltus.models.mixer_description import Angles
from saltus.models.rotary_angles import angles_of_positions


@device_function
def normed_row(
    x, weight, epsilon, inside, SIZE: tl.constexpr, ROUNDS_ONCE: tl.constexpr, CENTRED: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """weight · RMSNorm(x) (Zhang & Sennrich 2019) in float32, which rounds the norm before the product, or not.

    CENTRED: LayerNorm (Ba et al. 2016), which takes the mean off before.
    """
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, 0) / SIZE, 0.0)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + epsilon)
    if ROUNDS_ONCE:
        return weight * normed
    return rounded_product(weight, normed.to(dtype).to(tl.float32))


@kernel("num_rows", "epsilon", "output_epsilon", "scale", "state_scale")
def _add_and_norm(
    parts, hidden, weight, bias, output_weight, out, other_weight, other_bias, other_out, num_rows, epsilon,
    output_epsilon, scale, state_scale,
    SIZE: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr, NORMED: tl.constexpr, OUTPUT_NORMED: tl.constexpr,
    ROUNDS_ONCE: tl.constexpr, OUTPUT_ROUNDS_ONCE: tl.constexpr, SCALED: tl.constexpr, STATE_SCALED: tl.constexpr,
    CENTRED: tl.constexpr, BIASED: tl.constexpr, TWICE: tl.constexpr,
):  # fmt: skip
    """hidden += Σ parts, in their order, perhaps through a norm and scaled; out is the norm of that.

    The state may be scaled after the sum. TWICE: `other_out` is its norm with other weights.
    """
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside = at < SIZE
    dtype: tl.constexpr = hidden.dtype.element_ty
    state = tl.load(hidden + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        total = tl.load(parts + row * SIZE + at, mask=inside, other=0.0)
        for part in tl.static_range(1, PARTS):
            total += tl.load(parts + (part * num_rows + row) * SIZE + at, mask=inside, other=0.0)
        total = total.to(dtype).to(tl.float32)
        if OUTPUT_NORMED:
            factors = tl.load(output_weight + at, mask=inside, other=0.0).to(tl.float32)
            total = normed_row(total, factors, output_epsilon, inside, SIZE, OUTPUT_ROUNDS_ONCE, False, dtype)
            total = total.to(dtype).to(tl.float32)
        if SCALED:
            total = (total * scale).to(dtype).to(tl.float32)
        state = (state + total).to(dtype)
        if STATE_SCALED:
            state = (state.to(tl.float32) * state_scale).to(dtype)
        tl.store(hidden + row * SIZE + at, state, mask=inside)
        state = state.to(tl.float32)
    if TWICE:
        factors = tl.load(other_weight + at, mask=inside, other=0.0).to(tl.float32)
        other = normed_row(state, factors, epsilon, inside, SIZE, ROUNDS_ONCE, CENTRED, dtype)
        if BIASED:
            other += tl.load(other_bias + at, mask=inside, other=0.0)
        tl.store(other_out + row * SIZE + at, other, mask=inside)
    if NORMED:
        factors = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        state = normed_row(state, factors, epsilon, inside, SIZE, ROUNDS_ONCE, CENTRED, dtype)
        if BIASED:
            state += tl.load(bias + at, mask=inside, other=0.0)
    tl.store(out + row * SIZE + at, state, mask=inside)


@device_function
def summed_columns(
    parts, bias, row, place, inside, num_rows,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, BIASED: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Some columns of a row's parts, added in their order, with the bias and rounded; in float32."""
    total = tl.load(parts + row * WIDTH + place, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + (part * num_rows + row) * WIDTH + place, mask=inside, other=0.0)
    if BIASED:
        total += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
    return total.to(dtype).to(tl.float32)


@device_function
def _normed_head(
    first, second, norm, at_first, at_second, exists, scale, ROUNDS_ONCE: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Both halves times `scale` and the weights of a norm, rounded."""
    first, second = first * scale, second * scale
    if not ROUNDS_ONCE:
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    first = (tl.load(norm + at_first, mask=exists, other=0.0).to(tl.float32) * first).to(dtype).to(tl.float32)
    second = (tl.load(norm + at_second, mask=exists, other=0.0).to(tl.float32) * second).to(dtype).to(tl.float32)
    return first, second


@kernel("num_rows", "epsilon", "value_epsilon")
def _rotate_and_store(
    parts, bias, query_norm, key_norm, query_cosines, query_sines, key_cosines, key_sines, growth, positions, slots,
    queries, keys, values, num_rows, epsilon, value_epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, BIASED: tl.constexpr,
    NORMED: tl.constexpr, ALL_HEADS: tl.constexpr, ROTATED: tl.constexpr, ROUNDS_ONCE: tl.constexpr,
    WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr, PADDED_HEADS: tl.constexpr, VALUES: tl.constexpr,
    VALUE_NORMED: tl.constexpr, GATED: tl.constexpr, GROWS: tl.constexpr, ROTATES_ONCE: tl.constexpr,
    PADDED_HALF: tl.constexpr, SIZE: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """One head of one row: sum its parts, rotate queries and keys (Su et al. 2021), write keys and values to slots.

    The first WIDTH dimensions are rotated, in pairs that lie beside each other or half of them apart. A norm is that of
    the head, or of all heads of queries or of keys, or that of the ROTATED head. Without VALUES, values are the keys
    before their norm; they may have a norm of their own, without weights. GATED: a gate follows each query. GROUPED:
    the queries of a key, the key and its value stand together. GROWS: queries are multiplied by a number of their
    position. ROTATES_ONCE: products with angles are not rounded, their sums are. A row of parts has SIZE numbers.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = DIM // 2
    turned: tl.constexpr = WIDTH // 2  # pairs
    dtype: tl.constexpr = queries.dtype.element_ty
    at = tl.arange(0, PADDED_HALF)
    at_first, at_second = at, at + half  # of each pair
    if INTERLEAVED:
        at_first, at_second = 2 * at, 2 * at + 1
    elif turned > 0 and turned < half:  # then pairs of what is not rotated
        at_first, at_second = tl.where(at < turned, at, at + turned), tl.where(at < turned, at + turned, at + half)
    exists = at < half
    source = head
    if not VALUES:
        source = tl.where(head >= HEADS + KV_HEADS, head - KV_HEADS, head)
    if GATED:
        source += tl.minimum(head, HEADS)
    if GROUPED:
        count: tl.constexpr = HEADS // KV_HEADS  # queries of a group
        other = head - HEADS
        group = tl.where(other < 0, head // count, other % KV_HEADS)
        source = group * (count + 2) + tl.where(other < 0, head % count, count + other // KV_HEADS)
    first = summed_columns(parts, bias, row, source * DIM + at_first, exists, num_rows, SIZE, PARTS, BIASED, dtype)
    second = summed_columns(parts, bias, row, source * DIM + at_second, exists, num_rows, SIZE, PARTS, BIASED, dtype)
    slot = tl.load(slots + row)
    if head >= HEADS + KV_HEADS:
        if VALUE_NORMED:
            scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / DIM + value_epsilon)
            first, second = first * scale, second * scale
        to = values + (slot * KV_HEADS + head - HEADS - KV_HEADS) * DIM
        tl.store(to + at_first, first.to(dtype), mask=exists)
        tl.store(to + at_second, second.to(dtype), mask=exists)
    else:
        norm = query_norm if head < HEADS else key_norm
        if NORMED and not ROTATED:
            if ALL_HEADS:
                begin, count = tl.where(head < HEADS, 0, HEADS), tl.where(head < HEADS, HEADS, KV_HEADS)
                other, dim = tl.arange(0, PADDED_HEADS)[:, None], tl.arange(0, 2 * PADDED_HALF)[None, :]
                inside = (other < count) & (dim < DIM)
                place = (begin + other) * DIM + dim
                every = summed_columns(parts, bias, row, place, inside, num_rows, SIZE, PARTS, BIASED, dtype)
                scale = tl.rsqrt(tl.sum(tl.sum(every * every, 1), 0) / (count * DIM) + epsilon)
                norm += (head - begin) * DIM
            else:
                scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / DIM + epsilon)
            first, second = _normed_head(first, second, norm, at_first, at_second, exists, scale, ROUNDS_ONCE, dtype)
        left, right = first, second
        if WIDTH > 0:
            angle, is_turned = tl.load(positions + row) * WIDTH + at, at < turned
            cosines = query_cosines if head < HEADS else key_cosines
            sines = query_sines if head < HEADS else key_sines
            cos = tl.load(cosines + angle, mask=is_turned, other=1.0).to(tl.float32)
            sin = tl.load(sines + angle, mask=is_turned, other=0.0).to(tl.float32)
            if ROTATES_ONCE:
                left, right = first * cos - second * sin, second * cos + first * sin
            else:
                left = rounded_product(first, cos).to(dtype).to(tl.float32)
                left += rounded_product(-second, sin).to(dtype).to(tl.float32)
                right = rounded_product(second, cos).to(dtype).to(tl.float32)
                right += rounded_product(first, sin).to(dtype).to(tl.float32)
        if GROWS:
            factor = tl.where(head < HEADS, tl.load(growth + tl.load(positions + row)), 1.0)
            left, right = left * factor, right * factor
        if NORMED and ROTATED:
            left, right = left.to(dtype).to(tl.float32), right.to(dtype).to(tl.float32)
            scale = tl.rsqrt((tl.sum(left * left, 0) + tl.sum(right * right, 0)) / DIM + epsilon)
            left, right = _normed_head(left, right, norm, at_first, at_second, exists, scale, ROUNDS_ONCE, dtype)
        if head < HEADS:  # noqa: SIM108  # pointers of two tensors
            to = queries + (row * HEADS + head) * DIM
        else:
            to = keys + (slot * KV_HEADS + head - HEADS) * DIM
        tl.store(to + at_first, left.to(dtype), mask=exists)
        tl.store(to + at_second, right.to(dtype), mask=exists)


@dataclass(frozen=True)
class KernelNorm:
    """What the kernels read of a norm; a module of Transformers that has `weight` and `variance_epsilon` does, too."""

    weight: Tensor
    variance_epsilon: float
    rounds_once: bool = False  # after the product with the weight, and not before it, too
    all_heads: bool = False  # of queries or keys: not of each head
    rotated: bool = False  # likewise: of each head after it is rotated
    centred: bool = False  # a LayerNorm, of layers' inputs
    bias: Tensor | None = None  # that is added, in float32


class AngleTable(NamedTuple):
    """Cosines and sines of the first positions, [count, rotated dimensions]."""

    cosines: Tensor
    sines: Tensor
    interleaved: bool = False  # pairs of dimensions lie beside each other, not half of the rotated ones apart
    growth: Tensor | None = None  # [count]: what they are multiplied by; in float32 where nothing is rotated


def add_and_norm(
    parts: Tensor | None, hidden: Tensor, norm: Any, out: Tensor, rows: int, output_norm: Any = None,
    scale: float = 1.0, state_scale: float = 1.0, other: tuple[Any, Tensor] | None = None,
) -> None:  # fmt: skip
    """hidden [rows, size] += the sum of parts [parts, rows, size], if there are any; `out` is its norm, if it has one.

    The sum goes through `output_norm`, if there is one, and is multiplied by `scale`; what it makes of hidden is
    multiplied by `state_scale`. `other`: one more norm, which differs in weights and bias alone, and its `out`.
    """
    size = hidden.shape[1]
    first, second = norm or no_norm(hidden), output_norm or no_norm(hidden)
    bias, (other_norm, other_out) = getattr(norm, "bias", None), other or (first, hidden)
    other_bias = getattr(other_norm, "bias", None)
    _add_and_norm[(rows,)](
        hidden if parts is None else parts, hidden, first.weight, hidden if bias is None else bias, second.weight, out,
        other_norm.weight, hidden if other_bias is None else other_bias, other_out, rows,
        first.variance_epsilon, second.variance_epsilon, scale, state_scale,
        SIZE=size, PADDED=power_of_two(size), PARTS=0 if parts is None else len(parts), NORMED=norm is not None,
        OUTPUT_NORMED=output_norm is not None, ROUNDS_ONCE=rounds_once(norm),
        OUTPUT_ROUNDS_ONCE=rounds_once(output_norm), SCALED=scale != 1, STATE_SCALED=state_scale != 1,
        CENTRED=getattr(norm, "centred", False), BIASED=bias is not None, TWICE=other is not None,
        num_warps=4 if size <= 2048 else 8,
    )  # fmt: skip


def no_norm(unused: Tensor) -> KernelNorm:
    """In place of a norm that there is not: pointers that are not read."""
    return KernelNorm(unused, 0.0)


def rounds_once(norm: Any) -> bool:
    """How a norm of Transformers' Llama, or a KernelNorm, rounds."""
    return getattr(norm, "rounds_once", False)


def rotate_and_store(
    parts: Tensor, bias: Tensor | None, norms: tuple[Any, Any] | None, angles: Sequence[AngleTable],
    positions: Tensor, slots: Tensor, queries: Tensor, keys: Tensor | None, values: Tensor | None,
    value_epsilon: float | None = None, gated: bool = False, gate_columns: int = 0, grouped: bool = False,
) -> None:  # fmt: skip
    """From parts [parts, rows, size] of a product with the weights of queries, keys and values.

    Queries [rows, heads, dim] are written, and a layer's keys and values [slots, kv_heads, dim] at the rows' slots,
    unless there are queries alone. `angles` are those of queries and of keys; where they are empty nothing is rotated,
    and where their tables are, queries are multiplied by their growth alone. Values have an RMSNorm without weights if
    it has an epsilon; the size of parts says if they are the keys. `gated`: a gate follows each head's query.
    `grouped`: the queries of a key, the key and its value stand together. After everything else there are
    `gate_columns` numbers, which are not read.
    """
    heads, dim, rows, size = *queries.shape[1:], *parts.shape[1:]
    kv_heads = 0 if keys is None else keys.shape[1]
    unused = queries  # a pointer that is not read
    query_norm, key_norm = (unused, unused) if norms is None else (each.weight for each in norms)
    of_queries, of_keys = angles or [AngleTable(unused, unused)] * 2
    width = of_keys.cosines.shape[1] if angles else 0
    growth = None if width else of_queries.growth
    all_heads = norms is not None and getattr(norms[0], "all_heads", False)
    _rotate_and_store[(rows, heads + 2 * kv_heads)](
        parts, unused if bias is None else bias, query_norm, key_norm, *of_queries[:2], *of_keys[:2],
        unused if growth is None else growth, positions, slots, queries,
        unused if keys is None else keys, unused if values is None else values, rows,
        0.0 if norms is None else norms[0].variance_epsilon, value_epsilon or 0.0,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PARTS=len(parts), BIASED=bias is not None, NORMED=norms is not None,
        ALL_HEADS=all_heads, ROTATED=norms is not None and getattr(norms[0], "rotated", False),
        ROUNDS_ONCE=norms is not None and rounds_once(norms[0]),
        WIDTH=width, INTERLEAVED=of_keys.interleaved, GROWS=growth is not None,
        ROTATES_ONCE=of_keys.cosines.dtype != queries.dtype,
        PADDED_HEADS=power_of_two(max(heads, kv_heads)), GATED=gated, PADDED_HALF=power_of_two(dim // 2),
        VALUES=size - gate_columns == ((1 + gated) * heads + 2 * kv_heads) * dim,
        VALUE_NORMED=value_epsilon is not None, SIZE=size, GROUPED=grouped,
        num_warps=4 if all_heads else 1,
    )  # fmt: skip


def angle_table(rotary: Any, count: int, like: Tensor, angles: Angles, interleaved: bool = False) -> AngleTable:
    """The table of a description's angles, by a module of Transformers, in the dtype of `like` or in float32."""
    positions = torch.arange(count, device=like.device)[None]
    growth = None
    if angles.growth:
        steps = torch.floor((positions[0] + angles.shift).float() / angles.steps)
        growth = 1 + angles.growth * torch.log1p(steps)
    if angles.zeros:
        return AngleTable(like.new_empty(count, 0), like.new_empty(count, 0), interleaved, growth)
    found = angles_of_positions(rotary, like[None], positions, angles.layer_type)
    if isinstance(found, Tensor):  # complex numbers, in float32
        found = found.real, found.imag
    found = [x[0] for x in found]
    if angles.layout != "halves":
        found = [x[:, :: 2 if angles.layout == "interleaved" else 1].repeat(1, 2) for x in found]
    if angles.backwards:
        found[1] = -found[1]
    if growth is not None:
        found = [(x * growth[:, None]).to(x.dtype) for x in found]
        growth = growth.to(like.dtype)
    return AngleTable(*(x.contiguous() for x in found), interleaved, growth)
