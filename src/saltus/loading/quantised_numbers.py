"""What a quantised weight of a checkpoint holds: integers or 8-bit floats with scales, blocks of a GGUF format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from saltus.kernels.packed_blocks import FP8_BLOCK, RECODED_BLOCK, Arithmetic
from saltus.kernels.packed_weight import PackedWeight, dequantize_blocks
from saltus.models.cuda.packed_planes import MAX_SCALE, STEP, TILE_OUTPUTS
from saltus.models.cuda.packed_weight import GPUPackedWeight

Q = GGMLQuantizationType
BLOCK = 32  # inputs that share a scale in Q4_0, Q5_0 and Q8_0
FORMAT_OF_BITS = {4: Q.Q4_0, 5: Q.Q5_0, 8: Q.Q8_0}  # that holds signed integers of so many bits
FLOAT16_ROUNDING = 2.0**-11  # of a number, relative
# E2M1, by their bits
FOUR_BIT_FLOATS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
WORDS = torch.int32  # that integers of a few bits are packed in


@dataclass(frozen=True)
class ScaledIntegers:
    """The weights scales[out, input // (in / groups)] · integers[out, input].

    `integers` [out, in] are signed, and of `bits` or fewer; `scales` are [out, groups] in any dtype.
    """

    integers: Tensor
    scales: Tensor
    bits: int

    @property
    def group(self) -> int:
        """How many inputs share a scale."""
        return self.integers.shape[1] // self.scales.shape[1]

    def expand(self) -> Tensor:
        """The weights in float32."""
        grouped = self.integers.float().unflatten(1, (-1, self.group))
        return (grouped * self.scales.float()[..., None]).flatten(1)

    def is_exact(self) -> bool:
        """True if all scales are float16 numbers."""
        return torch.equal(self.scales.half().float(), self.scales.float())

    def why_not_packed(self) -> str | None:
        """What no GGUF format of the kernels holds; None if one does."""
        scales = self.scales.float()
        if self.group == 1:
            return "scales in another order than inputs (desc_act)"
        if self.bits not in FORMAT_OF_BITS:
            return f"integers of {self.bits} bits"
        if self.group % BLOCK:
            return f"groups of {self.group}, which are no multiple of {BLOCK}"
        if not ((scales.half().float() - scales).abs() <= FLOAT16_ROUNDING * scales.abs()).all():
            return "scales beyond float16"
        return None

    def pack(self, arithmetic: Arithmetic) -> PackedWeight:
        """The weights as blocks: the same numbers, rounded to bfloat16, where scales are float16 numbers."""
        format = FORMAT_OF_BITS[self.bits]
        scales = self.scales.half().repeat_interleave(self.group // BLOCK, 1)[..., None].view(torch.uint8)
        integers = self.integers.to(torch.int8).unflatten(1, (-1, BLOCK))
        if format == Q.Q8_0:
            parts = [scales, integers.view(torch.uint8)]
        else:
            unsigned = (integers + (1 << self.bits - 1)).view(torch.uint8)
            low, high = unsigned[..., : BLOCK // 2], unsigned[..., BLOCK // 2 :]
            parts = [scales, (low & 15) | (high & 15) << 4]
            if format == Q.Q5_0:
                parts.insert(1, _fifth_bits(unsigned))
        return PackedWeight.from_blocks(torch.cat(parts, -1).flatten(1), format, arithmetic)


def _fifth_bits(integers: Tensor) -> Tensor:
    """The fifth bits of integers [.., 32] as the bits of 4 bytes, the first in the lowest."""
    bits = (integers >> 4).unflatten(-1, (4, 8)) << torch.arange(8, dtype=torch.uint8)
    return bits.sum(-1, dtype=torch.uint8)


@dataclass(frozen=True)
class Blocks:
    """Weights as the blocks of a GGUF file: uint8 [out, bytes of a row] or [matrices, out, bytes of one].

    `is_transposed`: the model wants them as [.., in, out].
    """

    blocks: Tensor
    format: GGMLQuantizationType
    is_transposed: bool = False

    def expand(self) -> Tensor:
        """The weights in bfloat16."""
        weights, size = GGML_QUANT_SIZES[self.format]
        rows = self.blocks.flatten(0, -2)
        numbers = dequantize_blocks(rows, self.format).view(*self.blocks.shape[:-1], rows.shape[1] // size * weights)
        return numbers.mT if self.is_transposed else numbers

    def why_not_packed(self) -> str | None:
        """See ScaledIntegers."""
        return None

    def pack(self, arithmetic: Arithmetic) -> PackedWeight:
        """The same blocks."""
        weight = PackedWeight.from_blocks(self.blocks, self.format, arithmetic)
        return weight.flipped() if self.is_transposed else weight


@dataclass(frozen=True)
class FourBitFloats:
    """NVFP4: the weights of_all · scales[out, input // 16] · floats[out, input], of a matrix or a stack of them.

    `floats` [.., out, in] are the bits of one of FOUR_BIT_FLOATS in each byte, `scales` [.., out, in / 16] E4M3,
    `of_all` is one number in float32, [1], or one of each matrix or output: [.., 1 or out, 1].
    """

    floats: Tensor
    scales: Tensor
    of_all: Tensor

    def expand(self) -> Tensor:
        """The weights in float32."""
        values = FOUR_BIT_FLOATS[self.floats.int()].unflatten(-1, (-1, 16))
        return (values * (self.scales.float() * self.of_all)[..., None]).flatten(-2)

    def why_not_packed(self) -> str | None:
        """See ScaledIntegers."""
        if self.floats.shape[-1] % RECODED_BLOCK:
            return f"NVFP4 of {self.floats.shape[-1]} inputs, which are no multiple of {RECODED_BLOCK}"
        bits = self.scales.view(torch.uint8)
        return "scales below 0, or that are no numbers" if (bits >= 0x7F).any() else None

    def pack(self, arithmetic: Arithmetic) -> PackedWeight:
        """The same floats and scales."""
        return PackedWeight.from_four_bit_floats(self.floats, self.scales, self.of_all, arithmetic)


@dataclass(frozen=True)
class ScaledFloats:
    """The weights scales[out // height, in // width] · floats[out, in], of a matrix or a stack of them.

    `floats` [.., out, in] are E4M3 (Micikevicius et al. 2022), `scales` of blocks [height, width], which edges may cut,
    in float32.
    """

    floats: Tensor
    scales: Tensor
    block: tuple[int, int]

    def expand(self) -> Tensor:
        """The weights in float32."""
        scales, inputs = self._of_outputs(), self.floats.shape[-1]
        if self.block[1] < inputs:
            scales = scales.repeat_interleave(self.block[1], -1)[..., :inputs]
        return self.floats.float() * scales

    def _of_outputs(self) -> Tensor:
        """Scales [.., out, blocks of a row]."""
        return self.scales.repeat_interleave(self.block[0], -2)[..., : self.floats.shape[-2], :]

    def why_not_packed(self) -> str | None:
        """See ScaledIntegers."""
        inputs, width = self.floats.shape[-1], self.block[1]
        if inputs % FP8_BLOCK or (width % FP8_BLOCK and width < inputs):
            return f"8-bit floats in blocks of {width} inputs, of {inputs}"
        return self._why_no_numbers()

    def pack(self, arithmetic: Arithmetic) -> PackedWeight:
        """The same floats and scales, multiplied as bfloat16 numbers whatever the arithmetic."""
        scales, blocks = self._of_outputs(), self.floats.shape[-1] // FP8_BLOCK
        per_scale = -(-self.block[1] // FP8_BLOCK)
        return PackedWeight.from_eight_bit_floats(self.floats, scales.repeat_interleave(per_scale, -1)[..., :blocks])

    def why_not_packed_on_gpu(self) -> str | None:
        """What our kernels for GPUs do not read; None if they do."""
        *stack, outputs, inputs = self.floats.shape
        width = self.block[1]
        if inputs % STEP or (width % STEP and width < inputs) or (stack and outputs % TILE_OUTPUTS):
            return f"8-bit floats in blocks of {width} inputs, of {outputs} × {inputs}"
        return self._why_no_numbers()

    def pack_for_gpu(self) -> GPUPackedWeight:
        """The same floats and scales, for a GPU."""
        return GPUPackedWeight.from_floats(self.floats, self._of_outputs(), self.block[1])

    def _why_no_numbers(self) -> str | None:
        if not (self.scales.abs() < MAX_SCALE).all() or (self.floats.view(torch.uint8) & 0x7F == 0x7F).any():
            return f"scales of {MAX_SCALE:g} or more, or numbers that are none"
        return None


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """The unsigned integers of 2, 3, 4 or 8 bits in words or bytes [.., n], those in the lowest bits first.

    Those of 3 bits may begin in one word and end in the next: 8 of them are 3 bytes.
    """
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    if bits == 3:
        first, second, third = octets.int().unflatten(-1, (-1, 3)).unbind(-1)
        eight = first | second << 8 | third << 16
        return torch.stack([(eight >> 3 * place & 7).byte() for place in range(8)], -1).flatten(-2)
    shifts = range(0, 8, bits)
    return torch.stack([octets >> shift & (1 << bits) - 1 for shift in shifts], -1).flatten(-2)


def required(parts: Mapping[str, Tensor], name: str, dtypes: tuple[torch.dtype, ...], dimensions: int) -> Tensor:
    """A part of a quantised weight. Errors: ValueError if it is missing, or of another kind."""
    if name not in parts:
        raise ValueError(f"lacks its {name}")
    part = parts[name]
    if part.dtype not in dtypes or part.ndim != dimensions or not part.numel():
        kind = str(part.dtype).removeprefix("torch.")
        raise ValueError(f"has {name} of the wrong kind, {kind} {list(part.shape)}")
    return part


def check_shape(name: str, part: Tensor, *shape: int) -> None:
    """Raise ValueError for a part of another shape."""
    if part.shape != shape:
        raise ValueError(f"has {name} {list(part.shape)}, which must be {list(shape)}")


def check_groups(inputs: int, groups: int) -> None:
    """Raise ValueError unless all groups have as many inputs."""
    if inputs % groups:
        raise ValueError(f"has {inputs} inputs, which {groups} groups cannot share evenly")
