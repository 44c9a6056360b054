"""Arrange the integers or floats of weight matrices, and their scales, in planes that the tiles of a product read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType
from gguf.quants import IQ4_NL, MXFP4
from torch import Tensor

from saltus.kernels.packed_blocks import GROUP_OUTPUTS, Format

Q = GGMLQuantizationType
STEP = 64  # inputs that a step of a product reads; a step has LANES bytes of low bits for each output
LANES = 32
TILE_OUTPUTS = 64  # outputs are padded to a multiple of it
# What 4 bits stand for, as `table_of` in integer_weights.h, each with the integer that stands for 0 added: the smaller
# that is, the fewer bits are kept.
ZERO_OF_FP4 = 16
IQ4, FP4, IQ3_XXS, IQ3_S, BELOW_3_BITS = (
    tuple(zero + each for each in numbers)
    for zero, numbers in (
        (128, IQ4_NL.kvalues),
        (ZERO_OF_FP4, MXFP4.kvalues),
        (32, (2, 6, 10, 14, 18, 22, 26, 31, -2, -6, -10, -14, -18, -22, -26, -31)),
        (16, (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15)),
        (128, (8, 25, 43, -7, 1, 9, 0, 1, -8, -25, -43, -9, -1, 7, 2, -1)),
    )
)


class BlockLayout(NamedTuple):
    """What the numbers and scales of a format are (integer_weights.h)."""

    bits: int  # of an integer or float in a file
    zero: int = 0  # the integer that stands for 0
    of_256: bool = False  # blocks are of 256 inputs, with scales of 8 bits for 32 or 16 of them
    minimums: bool = False
    halves: bool = False  # each 16 inputs have their own scale
    table: tuple[int, ...] | None = None
    scales: str = "float16"  # their dtype, or "bfloat16"; "float8": those of 16 inputs are E4M3, those of 256 float32
    divisor: int = 1  # of scales
    span: int = 0  # of 8-bit floats (E4M3): steps that share a scale, in float32; 0: of integers

    @property
    def kept_bits(self) -> int:
        """Of an integer on the GPU: 4, 5, 6 or 8."""
        bits = max(self.table).bit_length() if self.table else max(self.bits, 4)
        return bits if bits <= 6 else 8


LAYOUTS: dict[Format, BlockLayout] = {
    Q.Q4_0: BlockLayout(4, 8),
    Q.Q4_1: BlockLayout(4, minimums=True),
    Q.Q5_0: BlockLayout(5, 16),
    Q.Q5_1: BlockLayout(5, minimums=True),
    Q.Q8_0: BlockLayout(8, 128),
    Q.IQ4_NL: BlockLayout(4, 128, table=IQ4),
    Q.MXFP4: BlockLayout(4, ZERO_OF_FP4, table=FP4, scales="bfloat16"),
    Q.Q2_K: BlockLayout(2, of_256=True, minimums=True, halves=True),
    Q.Q3_K: BlockLayout(3, 4, of_256=True, halves=True),
    Q.Q4_K: BlockLayout(4, of_256=True, minimums=True),
    Q.Q5_K: BlockLayout(5, of_256=True, minimums=True),
    Q.Q6_K: BlockLayout(6, 32, of_256=True, halves=True),
    Q.IQ4_XS: BlockLayout(4, 128, of_256=True, table=IQ4),
    Q.NVFP4: BlockLayout(4, ZERO_OF_FP4, of_256=True, halves=True, table=FP4, scales="float8", divisor=2),
    Q.IQ3_S: BlockLayout(4, 16, of_256=True, table=IQ3_S),
    Q.IQ3_XXS: BlockLayout(4, 32, of_256=True, table=IQ3_XXS, divisor=2),
    **dict.fromkeys(
        (Q.IQ2_XXS, Q.IQ1_S, Q.TQ1_0, Q.TQ2_0), BlockLayout(4, 128, of_256=True, table=BELOW_3_BITS, divisor=8)
    ),
    **dict.fromkeys(
        (Q.IQ2_XS, Q.IQ2_S, Q.IQ1_M), BlockLayout(4, 128, of_256=True, halves=True, table=BELOW_3_BITS, divisor=8)
    ),
}
FLOAT_SHIFT = 2.0**120  # by which E4M3 is too small when its bits are moved to those of a float32: its scales have it
MAX_SCALE = 2.0**8  # of 8-bit floats, which is infinite then


class Planes(NamedTuple):
    """The memory of a matrix. A lane of a step has two inputs: its place of the first 32 inputs, and of the second."""

    low: Tensor  # uint8 [steps, outputs, lanes] two integers of 4 bits; [steps, 2, outputs, lanes] of 8 bits
    high: Tensor  # uint8 [bytes, outputs, lanes] the other bits of 5 and 6, of 4 or 2 steps a byte; else of no size
    # int32 [words, steps, outputs] two float16 scales (MXFP4: bfloat16), then minimums; of 256: 4 bytes; of 8-bit
    # floats [1, spans, outputs] float32 scales · FLOAT_SHIFT
    fine: Tensor
    coarse: Tensor  # int32 [blocks, outputs] scale and minimum of 256 inputs in float16, or a float32; else of no size

    @classmethod
    def of_blocks(cls, rows: Tensor, inputs: int, format: Format) -> Planes:
        """Those of a matrix in blocks of a GGUF file, interleaved as the rows of a `PackedWeight`."""
        layout = LAYOUTS[format]
        groups, blocks = len(rows), inputs // (256 if layout.of_256 else 32)
        own = (2 if layout.minimums or layout.halves else 1) * 8 if layout.of_256 else 0
        wholes = 1 if layout.scales == "bfloat16" else 4 if layout.minimums or layout.scales == "float8" else 2
        size = blocks * (wholes + own) * GROUP_OUTPUTS
        scales = rows[:, :size].view(groups, blocks, wholes + own, GROUP_OUTPUTS)
        integers = _integers(rows[:, -(-size // 64) * 64 :].view(groups, inputs // 32, -1), layout)
        low, high = _integer_planes(integers, layout.kept_bits)
        return cls(low, high, *_scale_planes(scales, wholes, layout, inputs // STEP))._padded()

    @classmethod
    def of_floats(cls, floats: Tensor, scales: Tensor) -> Planes:
        """Those of 8-bit floats [out, in] and their scales [out, spans]; see `GPUPackedWeight.from_floats`."""
        low, high = _integer_planes(floats.view(torch.uint8).unflatten(1, (-1, 32)).transpose(0, 1), 8)
        words = (scales.float().T * FLOAT_SHIFT).contiguous().view(torch.int32)
        return cls(low, high, words[None], words.new_empty(0, words.shape[1]))._padded()

    @classmethod
    def joined(cls, several: Sequence[Planes], stack: int = 1) -> Planes:
        """The outputs of several after each other, those of each matrix of stacks of `stack` matrices."""
        return cls(*(
            torch.cat([each.unflatten(dim, (stack, -1)) for each in alike], dim).flatten(dim - 1, dim)
            for alike, dim in zip(zip(*several, strict=True), OUTPUT_DIMS, strict=True)
        ))  # fmt: skip

    def _padded(self) -> Planes:
        """With outputs up to a multiple of TILE_OUTPUTS, whose numbers are 0."""
        end = [0, -self.fine.shape[-1] % TILE_OUTPUTS]
        return Planes(*(
            F.pad(each, [0, 0] * (-1 - dim) + end).contiguous() for each, dim in zip(self, OUTPUT_DIMS, strict=True)
        ))  # fmt: skip

    def expanded(self, layout: BlockLayout) -> Tensor:
        """The matrix [out, in] in bfloat16, with the outputs that pad it."""
        low, high, fine, coarse = self
        bits = layout.kept_bits
        if bits == 8:
            pair = low.transpose(0, 1)
        else:
            pair = torch.stack([low & 15, low >> 4])
            if bits > 4:
                more = torch.stack([high >> 2 * (bits - 4) * part for part in range(4 // (bits - 4))], 1).flatten(0, 1)
                more, mask = more[: len(low)], (1 << bits - 4) - 1
                pair = pair | torch.stack([more & mask, more >> bits - 4 & mask]) << 4
        numbers = pair.contiguous().view(torch.float8_e4m3fn).float() if layout.span else pair.float() - layout.zero
        scale, minimum = (
            each.repeat_interleave(LANES // 2, -1) for each in _scales(fine, coarse, layout, len(low))
        )  # [2, steps, outputs, lanes]: as the numbers
        expanded = (numbers * scale + minimum).to(torch.bfloat16).permute(2, 1, 0, 3)
        return expanded.flatten(1).contiguous()


OUTPUT_DIMS = -2, -2, -1, -1  # of the planes


def _integers(planes: Tensor, layout: BlockLayout) -> Tensor:
    """The integers [numbers, outputs, 32] of planes of bits [groups, numbers, bytes], as `get_planes` finds them."""
    bits = layout.bits
    width = 8 if bits == 8 else 2 if bits < 4 else 4
    found = _plane(planes[..., : width * 4 * GROUP_OUTPUTS], width)
    if bits > width:
        found = found | _plane(planes[..., width * 4 * GROUP_OUTPUTS :], bits - width) << width
    if layout.table:
        found = torch.tensor(layout.table, dtype=torch.uint8, device=planes.device)[found.long()]
    return found


def _plane(plane: Tensor, width: int) -> Tensor:
    """The bits of a plane [groups, numbers, bytes], as `plane_place` and `plane_shift` say: [numbers, outputs, 32]."""
    per_byte = 8 // width
    fours = plane.unflatten(-1, (-1, GROUP_OUTPUTS, 4))  # [groups, numbers, places, outputs, 4]
    places = fours.shape[2]
    if width == 4:  # neighbours are in neighbouring bytes; in narrower planes in the same one
        parts = [fours[:, :, j % 4] >> j // 4 * 4 for j in range(8)]
    else:
        parts = [fours[:, :, j // per_byte if places > 1 else 0] >> j % per_byte * width for j in range(8)]
    inputs = torch.stack([part & (1 << width) - 1 for part in parts], -2).flatten(-2)  # [groups, numbers, outputs, 32]
    return inputs.transpose(0, 1).flatten(1, 2)


def _integer_planes(integers: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """`Planes.low` and `high` of integers [numbers, outputs, 32]."""
    outputs = integers.shape[1]
    steps = integers.unflatten(0, (-1, 2)).transpose(0, 1)  # [2, steps, outputs, lanes]
    none = steps.new_empty(0, outputs, LANES)
    if bits == 8:
        return steps.transpose(0, 1), none
    low = steps[0] & 15 | steps[1] << 4
    if bits == 4:
        return low, none
    width, per_byte = bits - 4, 4 // (bits - 4)
    pairs = steps[0] >> 4 | steps[1] >> 4 << width
    pairs = torch.cat([pairs, pairs.new_zeros(-len(pairs) % per_byte, outputs, LANES)]).unflatten(0, (-1, per_byte))
    high = pairs[:, 0].clone()
    for part in range(1, per_byte):
        high |= pairs[:, part] << 2 * width * part
    return low, high


def _scale_planes(scales: Tensor, wholes: int, layout: BlockLayout, steps: int) -> tuple[Tensor, Tensor]:
    """`Planes.fine` and `coarse` of the scales [groups, blocks, bytes, outputs] of a group."""
    outputs = len(scales) * GROUP_OUTPUTS

    def halves(part: Tensor) -> Tensor:
        """int16 [blocks, outputs] of the bytes of float16 numbers, which stand side by side."""
        return part.flatten(2).view(torch.int16).transpose(0, 1).flatten(1)

    if layout.scales == "bfloat16":
        exponents = scales[:, :, 0].transpose(0, 1).flatten(1).int() - 1  # half of 2^(e − 127), as bfloat16
        words = [torch.where(exponents > 0, exponents << 7, 0x40 >> -exponents.clamp(max=0)).to(torch.int16)]
    else:
        words = [halves(scales[:, :, start : start + 2]) for start in range(0, wholes, 2)]
    if not layout.of_256:
        by_step = torch.stack([word.unflatten(0, (steps, 2)) for word in words])  # [words, steps, 2, outputs]
        return _words(by_step.movedim(2, -1)), scales.new_empty(0, outputs, dtype=torch.int32)
    if layout.scales == "float8":  # two words of 16 bits are a number
        coarse = scales[:, :, :wholes].flatten(2).view(torch.int16).unflatten(2, (-1, 2)).transpose(0, 1).flatten(1, 2)
    else:
        coarse = torch.stack([words[0], words[1] if len(words) > 1 else torch.zeros_like(words[0])], -1)
    own = scales[:, :, wholes:].unflatten(2, (8, -1))  # [groups, blocks, numbers, bytes, outputs]
    if own.shape[3] == 1:
        own = torch.cat([own, torch.zeros_like(own)], 3)
    own = own.permute(1, 2, 0, 4, 3).reshape(steps, 2, outputs, 2).transpose(1, 2).flatten(2)
    return _words(own)[None], _words(coarse)


def _words(parts: Tensor) -> Tensor:
    """The parts [.., parts of 4 bytes] as int32 [..]."""
    return parts.contiguous().view(torch.int32).squeeze(-1)


def _scales(fine: Tensor, coarse: Tensor, layout: BlockLayout, steps: int) -> tuple[Tensor, Tensor]:
    """Scales and minimums [2, steps, outputs, 2], float32, of both halves of both 32 inputs of a step."""
    if layout.span:
        scale = (
            (fine.view(torch.float32) / FLOAT_SHIFT)
            .repeat_interleave(layout.span, 1)[:, :steps, :, None]
            .expand(2, -1, -1, 2)
        )
        return scale, torch.zeros_like(scale)
    kind = torch.bfloat16 if layout.scales == "bfloat16" else torch.float16
    if not layout.of_256:
        numbers = fine[..., None].contiguous().view(kind).float().movedim(-1, 1)  # [words, 2, steps, outputs]
        scale = numbers[0]
        minimum = numbers[1] if layout.minimums else torch.zeros_like(scale)
        return scale[..., None].expand(-1, -1, -1, 2), minimum[..., None].expand(-1, -1, -1, 2)
    if layout.scales == "float8":
        wholes = coarse.view(torch.float32)[..., None].expand(-1, -1, 2)
    else:
        wholes = coarse[..., None].contiguous().view(kind).float()
    whole, least = (
        each[:, None].expand(-1, 4, -1).flatten(0, 1)[: fine.shape[1], :, None] for each in wholes.unbind(-1)
    )  # [steps, outputs, 1]
    own = fine[0][..., None].contiguous().view(torch.uint8).unflatten(-1, (2, 2)).movedim(-2, 0)  # as what is returned
    if layout.halves and layout.minimums:
        return whole * (own & 15).float(), -(least * (own >> 4).float())
    if layout.minimums:
        return (whole * own[..., :1].float()).expand(own.shape), -(least * own[..., 1:].float()).expand(own.shape)
    kind_of_own = torch.float8_e4m3fn if layout.scales == "float8" else torch.int8
    signed = (own if layout.halves else own[..., :1].expand(own.shape)).contiguous().view(kind_of_own)
    return whole / layout.divisor * signed.float(), torch.zeros(own.shape, device=own.device)
