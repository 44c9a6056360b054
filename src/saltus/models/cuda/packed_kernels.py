"""Multiply rows by packed weights, which become bfloat16 numbers in registers: a call reads the bytes of the blocks.

Tiles, parts and the order of sums are as in linear_kernels.py: they follow from the layer's sizes alone. A step
multiplies 64 inputs, first one of the two that each lane has, then the other (`packed_weight.Planes`).
"""

# Triton's own types differ between its releases, and say of `range` in a kernel that nothing comes back.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from saltus.models.cuda.launching import device_function, kernel, pipeline_bytes
from saltus.models.cuda.packed_planes import LANES, STEP, TILE_OUTPUTS
from saltus.models.cuda.packed_weight import GPUPackedWeight

STAGES = 4  # of the pipeline, at most: they change no sums
WIDE_TILE = 2 * TILE_OUTPUTS  # outputs, where a weight has whole ones: what is common to all lanes is half as often


@device_function
def with_biases(sums, biases, place, inside, BIASED: tl.constexpr):
    """Sums [outputs, rows], and the biases at these places where they are inside, if there are any."""
    if BIASED:
        sums += tl.load(biases + place, mask=inside, other=0.0).to(tl.float32)[:, None]
    return sums


@device_function
def _signed(byte):
    """A byte as the number of 8 bits that it is, −128 to 127."""
    return byte - (byte & 128) * 2


@device_function
def _number(word, place: tl.constexpr, SCALES: tl.constexpr):
    """One of the two numbers of 16 bits of a word, in float32."""
    bits = ((word >> 16 * place) & 0xFFFF).to(tl.uint16)
    if SCALES == "bfloat16":
        return bits.to(tl.bfloat16, bitcast=True).to(tl.float32)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@device_function
def _float8(bits):
    """8-bit floats (E4M3) that are not negative, in float32; see `widen_e4m3` in integer_weights.h."""
    least = bits < 8
    moved = ((bits << 20) + (tl.where(least, 121, 120) << 23)).to(tl.float32, bitcast=True)
    return tl.where(least, moved - 0.015625, moved)


@device_function
def _scales(
    word, second_word, whole, upper, place: tl.constexpr, UNIT: tl.constexpr,
    OF_256: tl.constexpr, MINIMUMS: tl.constexpr, HALVES: tl.constexpr, SCALES: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The scale, over UNIT, and the minimum of each output's first or second 32 inputs, [outputs, 1].

    Where halves of these have their own, [outputs, lanes]; `upper` says which lanes belong to the second half.
    """
    if SPAN:
        scales = word.to(tl.float32, bitcast=True)[:, None]
        minimums = scales  # there are none
    elif OF_256:
        first, second = (word >> 16 * place) & 255, (word >> 16 * place + 8) & 255
        if SCALES == "float8":
            scale, least = whole.to(tl.float32, bitcast=True) * (1 / UNIT), 0.0
        else:
            scale, least = _number(whole, 0, SCALES) * (1 / UNIT), -_number(whole, 1, SCALES)
        if HALVES:
            if MINIMUMS:
                own, other = scale * (first & 15).to(tl.float32), scale * (second & 15).to(tl.float32)
            elif SCALES == "float8":
                own, other = scale * _float8(first), scale * _float8(second)
            else:
                own, other = scale * _signed(first).to(tl.float32), scale * _signed(second).to(tl.float32)
            scales = tl.where(upper, other[:, None], own[:, None])
            minimums = scales  # there are none
            if MINIMUMS:
                low, high = least * (first >> 4).to(tl.float32), least * (second >> 4).to(tl.float32)
                minimums = tl.where(upper, high[:, None], low[:, None])
        else:
            scales = (scale * (first if MINIMUMS else _signed(first)).to(tl.float32))[:, None]
            minimums = (least * second.to(tl.float32))[:, None]
    else:
        scales = (_number(word, place, SCALES) * (1 / UNIT))[:, None]
        minimums = _number(second_word, place, SCALES)[:, None]
    return scales, minimums


@device_function
def _less(integer, zero: tl.constexpr):
    """An integer below 2^23 less a constant, in float32; as the low bits of 2^23 it needs no slow conversion."""
    return (integer | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)


@device_function
def _number_of(byte, zero: tl.constexpr, SPAN: tl.constexpr):
    """What a scale multiplies: an integer less `zero`, or an 8-bit float (E4M3) over FLOAT_SHIFT, in float32."""
    if SPAN:  # its sign and, four bits below, its exponent and digits; -0x78100000 keeps these bits
        return ((byte << 24 >> 4) & -0x78100000).to(tl.float32, bitcast=True)
    return _less(byte, zero)


@device_function
def _bytes(words):
    """The bytes [outputs, 4 · words] of words of 32 bits, each in a number of its own."""
    first, second = words & 255, (words >> 8) & 255
    third, fourth = (words >> 16) & 255, (words >> 24) & 255
    pairs = tl.join(tl.join(first, third), tl.join(second, fourth))  # [outputs, words, half, byte of the half]
    return tl.reshape(pairs, (words.shape[0], 4 * words.shape[1]))


@device_function
def packed_sums(
    inputs, exists, low, high, fine, coarse, columns, part,
    STRIDE: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
    OF_256: tl.constexpr, MINIMUMS: tl.constexpr, HALVES: tl.constexpr, SCALES: tl.constexpr, SPAN: tl.constexpr,
    DIVISOR: tl.constexpr, MASKED: tl.constexpr, LANES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The part's sums [outputs, rows] of some outputs of a weight, and rows whose first lanes are at `inputs`.

    Of 5 and 6 bits `low` and `high` are words. `exists` [1, rows] says which rows are read, if MASKED.
    """
    lane = tl.arange(0, LANES)
    upper = (lane >= LANES // 2)[None, :]
    words: tl.constexpr = LANES // 4
    place = columns[:, None] * LANES + lane[None, :]
    place_of_word = columns[:, None] * words + tl.arange(0, words)[None, :]
    dtype: tl.constexpr = inputs.dtype.element_ty
    sums = tl.zeros((columns.shape[0], inputs.shape[1]), dtype=tl.float32)
    unit: tl.constexpr = 16 if BITS == 4 else 1  # of the second integer, if it stays in place  # pyright: ignore[reportAssignmentType]
    steps: tl.constexpr = K // STEP
    per_part: tl.constexpr = (steps + PARTS - 1) // PARTS
    for number in tl.range(0, tl.minimum(per_part, steps - part * per_part)):
        step = part * per_part + number
        at = step * STRIDE
        if BITS == 8:
            first = tl.load(low + 2 * at * LANES + place).to(tl.int32)
            second = tl.load(low + (2 * at + STRIDE) * LANES + place).to(tl.int32)
        elif BITS == 4:
            both = tl.load(low + at * LANES + place).to(tl.int32)
            first, second = both & 15, both & 240
        else:  # four lanes at once, in words: it takes several operations to put a number together
            width: tl.constexpr = BITS - 4
            per_byte: tl.constexpr = 4 // width
            mask: tl.constexpr = 0x01010101 * ((1 << width) - 1)
            both = tl.load(low + at * words + place_of_word)
            more = tl.load(high + step // per_byte * STRIDE * words + place_of_word)
            more = more >> (step % per_byte * 2 * width).to(tl.int32)
            first = _bytes((both & 0x0F0F0F0F) | (more & mask) << 4)
            second = _bytes(((both >> 4) & 0x0F0F0F0F) | ((more >> width) & mask) << 4)
        word = tl.load(fine + (step // SPAN * STRIDE if SPAN else at) + columns)
        second_word, whole = word, word
        if OF_256:
            whole = tl.load(coarse + step // 4 * STRIDE + columns)
        elif MINIMUMS:
            second_word = tl.load(fine + steps * STRIDE + at + columns)
        scale, minimum = _scales(word, second_word, whole, upper, 0, DIVISOR, OF_256, MINIMUMS, HALVES, SCALES, SPAN)
        weight = _number_of(first, ZERO, SPAN) * scale
        if MINIMUMS:
            weight += minimum
        row = _rows(inputs + step * STEP, exists, MASKED)
        sums = tl.dot(_moved(weight.to(dtype)), row, sums, input_precision="ieee")
        scale, minimum = _scales(
            word, second_word, whole, upper, 1, unit * DIVISOR, OF_256, MINIMUMS, HALVES, SCALES, SPAN
        )
        weight = _number_of(second, ZERO * unit, SPAN) * scale
        if MINIMUMS:
            weight += minimum
        row = _rows(inputs + step * STEP + LANES, exists, MASKED)
        sums = tl.dot(_moved(weight.to(dtype)), row, sums, input_precision="ieee")
    return sums


@device_function
def _moved(weight):
    """The same numbers, of 16 bits, in registers that nothing else is written to while a product reads them.

    Products of a warp group read registers after later instructions have begun. Triton 3.6 lets the next step write to
    those of the last product (triton#9433); it does not where assembly stands between.
    """
    if weight.dtype.primitive_bitwidth == 16:
        moved = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [weight], dtype=weight.dtype, is_pure=False, pack=2
        )
        return moved
    return weight


@device_function
def _rows(pointers, exists, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=exists, other=0.0)
    return tl.load(pointers)


@kernel("num_rows")
def _packed_linear(
    x, low, high, fine, coarse, bias, out, num_rows,
    N: tl.constexpr, STRIDE: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, FIRST: tl.constexpr,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, OF_256: tl.constexpr,
    MINIMUMS: tl.constexpr, HALVES: tl.constexpr, SCALES: tl.constexpr, SPAN: tl.constexpr, DIVISOR: tl.constexpr,
    BLOCK_N: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """out[part, row, FIRST + n]: the part's sums, with the bias in the first one, in the dtype of `out`."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part, rows = tl.program_id(1).to(tl.int64), tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    inside = rows[None, :] < num_rows
    inputs = x + rows[None, :].to(tl.int64) * K + tl.arange(0, LANES)[:, None]
    sums = packed_sums(
        inputs, inside, low, high, fine, coarse, columns, part,
        STRIDE, K, PARTS, BITS, ZERO, OF_256, MINIMUMS, HALVES, SCALES, SPAN, DIVISOR, False, LANES, STEP,
    )  # fmt: skip
    sums = with_biases(sums, bias, columns, columns < tl.where(part == 0, N, 0), BIASED)
    to = out + (part * num_rows + rows[None, :]) * WIDTH + FIRST + columns[:, None]
    tl.store(to, sums.to(out.dtype.element_ty), mask=(columns < N)[:, None] & inside)


def launch_facts(x: Tensor, weight: GPUPackedWeight, outputs: int, tile_rows: int) -> tuple[Any, dict[str, Any]]:
    """The planes of a weight as the kernels read them, and the constants of both kernels."""
    planes, layout = weight.planes, weight.block_layout
    columns = WIDE_TILE if outputs % WIDE_TILE == 0 else TILE_OUTPUTS
    bytes_of_output = LANES * (1 if layout.kept_bits == 4 else 2) + 8
    stage = columns * bytes_of_output + tile_rows * STEP * x.element_size()
    if layout.kept_bits in (5, 6):
        planes = planes._replace(low=planes.low.view(torch.int32), high=planes.high.view(torch.int32))
    return planes, {
        "STRIDE": planes.fine.stride(1), "K": weight.shape[-1], "BITS": layout.kept_bits, "ZERO": layout.zero,
        "OF_256": layout.of_256, "MINIMUMS": layout.minimums, "HALVES": layout.halves,
        "SCALES": layout.scales, "SPAN": layout.span, "DIVISOR": layout.divisor, "BLOCK_N": columns,
        "ROWS": tile_rows, "LANES": LANES, "STEP": STEP, "num_warps": 4,
        "num_stages": max(1, min(STAGES, pipeline_bytes(x.device) // stage)),
    }  # fmt: skip


def packed_linear(
    x: Tensor,
    weight: GPUPackedWeight,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    tile_rows: int,
    parts: int,
    rows: int,
    first: int,
) -> None:
    """Columns from `first` on of out [parts, rows, width], of x [whole tiles of rows, K], a weight [N, K], a bias."""
    planes, facts = launch_facts(x, weight, weight.planes.fine.shape[-1], tile_rows)
    _packed_linear[(-(-len(weight) // facts["BLOCK_N"]), parts, -(-rows // tile_rows))](
        x, *planes, x if bias is None else bias, out, rows, N=len(weight), PARTS=parts, FIRST=first,
        WIDTH=out.shape[-1], BIASED=bias is not None, **facts,
    )  # fmt: skip
