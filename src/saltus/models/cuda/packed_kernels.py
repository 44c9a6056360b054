"""Multiply rows by packed weights, which become bfloat16 numbers in registers: a call reads the bytes of the blocks.

Tiles, parts and the order of sums are as in linear_kernels.py: they follow from the layer's sizes alone. A step
multiplies 64 inputs, first one of the two that each lane has, then the other (`packed_weight.Planes`).

What takes time is to put the numbers together, so that takes few operations. The bits of an integer below 2^24 are
those of the float32 integer · 2^−149, wherever they lie in a word: a mask takes one out of it, and one fused operation
multiplies it by its scale and adds the minimum. The scales, which are below 2^42, have what is missing but for 2^−64
(with all of it they would be infinite). The sums get that back: powers of two change no digits.
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
# With four, Triton takes the products of a warp group, which wait for each other where an operand lies in registers,
# and whose registers Triton 3.6 writes to while they are read (triton#9433).
WARPS = 2
LOWERED = tl.constexpr(2.0**-64)  # of all weights but those of 8-bit floats
RAISED = tl.constexpr(2.0**85)  # 2^149 · LOWERED


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
    """The scale · RAISED / UNIT, and the minimum · LOWERED, of each output's first or second 32 inputs, [outputs, 1].

    Where halves of these have their own, [outputs, words]; `upper` says which words belong to the second half. The
    scale of 8-bit floats is given as it is, and without minimums the second value means nothing.
    """
    raised: tl.constexpr = RAISED / UNIT  # pyright: ignore[reportAssignmentType]
    if SPAN:
        scales = word.to(tl.float32, bitcast=True)[:, None]
        minimums = scales  # there are none
    elif OF_256:
        first, second = (word >> 16 * place) & 255, (word >> 16 * place + 8) & 255
        if SCALES == "float8":
            scale, least = whole.to(tl.float32, bitcast=True) * raised, 0.0
        else:
            scale, least = _number(whole, 0, SCALES) * raised, _number(whole, 1, SCALES) * -LOWERED
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
        scales = (_number(word, place, SCALES) * raised)[:, None]
        minimums = (_number(second_word, place, SCALES) * LOWERED)[:, None]
    return scales, minimums


@device_function
def _byte(words, place: tl.constexpr, MASK: tl.constexpr, SPAN: tl.constexpr):
    """What lies in a byte of each word, as float32: an integer · 2^(8 · place − 149), of the last byte 2^(16 − 149).

    Of 8-bit floats (E4M3) the number over FLOAT_SHIFT: its sign and, four bits below, its exponent and digits.
    """
    if SPAN:
        bits = (words << 24 - 8 * place >> 4) & -0x78100000
    elif place == 3:  # an integer in the last byte would reach into the exponent
        bits = (words >> 8) & (MASK << 16)
    else:
        bits = words & (MASK << 8 * place)
    return bits.to(tl.float32, bitcast=True)


@device_function
def _weights(words, scale, least, MASK: tl.constexpr, SPAN: tl.constexpr):
    """Weights [outputs, 4 · words] of the bits MASK of the words' bytes, which are times a scale, and `least` added."""
    first = _byte(words, 0, MASK, SPAN) * scale + least
    second = _byte(words, 1, MASK, SPAN) * (scale if SPAN else scale * 0.00390625) + least
    third = _byte(words, 2, MASK, SPAN) * (scale if SPAN else scale * 1.52587890625e-05) + least
    fourth = _byte(words, 3, MASK, SPAN) * (scale if SPAN else scale * 1.52587890625e-05) + least
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

    `exists` [1, rows] says which rows are read, if MASKED.
    """
    words: tl.constexpr = LANES // 4
    word_of_lanes = tl.arange(0, words)[None, :]
    upper = word_of_lanes >= words // 2
    place = columns[:, None] * words + word_of_lanes
    dtype: tl.constexpr = inputs.dtype.element_ty
    sums = tl.zeros((columns.shape[0], inputs.shape[1]), dtype=tl.float32)
    unit: tl.constexpr = 16 if BITS == 4 else 1  # of the second integer of a byte  # pyright: ignore[reportAssignmentType]
    mask: tl.constexpr = 15 if BITS == 4 else 255  # of the first one  # pyright: ignore[reportAssignmentType]
    steps: tl.constexpr = K // STEP
    per_part: tl.constexpr = (steps + PARTS - 1) // PARTS
    for number in tl.range(0, tl.minimum(per_part, steps - part * per_part)):
        step = part * per_part + number
        at = step * STRIDE
        if BITS == 8:
            first = tl.load(low + 2 * at * words + place)
            second = tl.load(low + (2 * at + STRIDE) * words + place)
        elif BITS == 4:
            first = tl.load(low + at * words + place)
            second = first
        else:  # four lanes at once: it takes several operations to put a number together
            width: tl.constexpr = BITS - 4
            per_byte: tl.constexpr = 4 // width
            added: tl.constexpr = 0x01010101 * ((1 << width) - 1)
            both = tl.load(low + at * words + place)
            more = tl.load(high + step // per_byte * STRIDE * words + place)
            more = more >> (step % per_byte * 2 * width).to(tl.int32)
            first = (both & 0x0F0F0F0F) | (more & added) << 4
            second = ((both >> 4) & 0x0F0F0F0F) | ((more >> width) & added) << 4
        word = tl.load(fine + (step // SPAN * STRIDE if SPAN else at) + columns)
        second_word, whole = word, word
        if OF_256:
            whole = tl.load(coarse + step // 4 * STRIDE + columns)
        elif MINIMUMS:
            second_word = tl.load(fine + steps * STRIDE + at + columns)
        scale, least = _scales(word, second_word, whole, upper, 0, DIVISOR, OF_256, MINIMUMS, HALVES, SCALES, SPAN)
        if not MINIMUMS:
            least = scale * (-ZERO * 2.0**-149)
        weight = _opaque(_weights(first, scale, least, mask, SPAN).to(dtype))
        sums = tl.dot(weight, _rows(inputs + step * STEP, exists, MASKED), sums, input_precision="ieee")
        scale, least = _scales(
            word, second_word, whole, upper, 1, unit * DIVISOR, OF_256, MINIMUMS, HALVES, SCALES, SPAN
        )
        if not MINIMUMS:
            least = scale * (-ZERO * unit * 2.0**-149)
        weight = _opaque(_weights(second, scale, least, mask * unit, SPAN).to(dtype))
        sums = tl.dot(weight, _rows(inputs + step * STEP + LANES, exists, MASKED), sums, input_precision="ieee")
    return sums if SPAN else sums * (1.0 / LOWERED)


@device_function
def _opaque(weight):
    """The same numbers; where they have 16 bits, Triton does not see what they were made of.

    It would choose how the operands of a product lie in registers by the width of the integers, and read the rows from
    shared memory number by number.
    """
    if weight.dtype.primitive_bitwidth == 16:
        hidden = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [weight], dtype=weight.dtype, is_pure=False, pack=2
        )
        return hidden
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


def launch_facts(x: Tensor, weight: GPUPackedWeight, tile_rows: int) -> tuple[Any, dict[str, Any]]:
    """The planes of a weight as the kernels read them, and the constants of both kernels."""
    planes, layout = weight.planes, weight.block_layout
    bytes_of_output = LANES * (1 if layout.kept_bits == 4 else 2) + 8
    stage = TILE_OUTPUTS * bytes_of_output + tile_rows * STEP * x.element_size()
    planes = planes._replace(low=planes.low.view(torch.int32), high=planes.high.view(torch.int32))
    return planes, {
        "STRIDE": planes.fine.stride(1), "K": weight.shape[-1], "BITS": layout.kept_bits, "ZERO": layout.zero,
        "OF_256": layout.of_256, "MINIMUMS": layout.minimums, "HALVES": layout.halves,
        "SCALES": layout.scales, "SPAN": layout.span, "DIVISOR": layout.divisor, "BLOCK_N": TILE_OUTPUTS,
        "ROWS": tile_rows, "LANES": LANES, "STEP": STEP, "num_warps": WARPS,
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
    planes, facts = launch_facts(x, weight, tile_rows)
    _packed_linear[(-(-len(weight) // facts["BLOCK_N"]), parts, -(-rows // tile_rows))](
        x, *planes, x if bias is None else bias, out, rows, N=len(weight), PARTS=parts, FIRST=first,
        WIDTH=out.shape[-1], BIASED=bias is not None, **facts,
    )  # fmt: skip
