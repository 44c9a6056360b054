"""Keep weight matrices in the quantised blocks of a GGUF file on a GPU, arranged as the products' tiles read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType
from gguf.quants import IQ4_NL, MXFP4
from torch import Tensor
from torch.utils._pytree import tree_map_only

from saltus.kernels.packed_weight import GROUP_OUTPUTS, PackedWeight

Q = GGMLQuantizationType
STEP = 64  # inputs that a step of a product reads; a step has LANES bytes of low bits for each output
LANES = 32
TILE_OUTPUTS = 64  # outputs are padded to a multiple of it
IQ4, FP4 = (tuple(128 + each for each in kind.kvalues) for kind in (IQ4_NL, MXFP4))  # what 4 bits stand for


class BlockLayout(NamedTuple):
    """What the integers and scales of a format are (integer_weights.h)."""

    bits: int  # of an integer in a file
    zero: int = 0  # the integer that stands for 0
    of_256: bool = False  # blocks are of 256 inputs, with scales of 8 bits for 32 or 16 of them
    minimums: bool = False
    halves: bool = False  # each 16 inputs have their own scale
    table: tuple[int, ...] | None = None

    @property
    def kept_bits(self) -> int:
        """Of an integer on the GPU: 4, 5, 6 or 8."""
        return 8 if self.table else max(self.bits, 4)


LAYOUTS = {
    Q.Q4_0: BlockLayout(4, 8),
    Q.Q4_1: BlockLayout(4, minimums=True),
    Q.Q5_0: BlockLayout(5, 16),
    Q.Q5_1: BlockLayout(5, minimums=True),
    Q.Q8_0: BlockLayout(8, 128),
    Q.IQ4_NL: BlockLayout(4, 128, table=IQ4),
    Q.MXFP4: BlockLayout(4, 128, table=FP4),
    Q.Q2_K: BlockLayout(2, of_256=True, minimums=True, halves=True),
    Q.Q3_K: BlockLayout(3, 4, of_256=True, halves=True),
    Q.Q4_K: BlockLayout(4, of_256=True, minimums=True),
    Q.Q5_K: BlockLayout(5, of_256=True, minimums=True),
    Q.Q6_K: BlockLayout(6, 32, of_256=True, halves=True),
    Q.IQ4_XS: BlockLayout(4, 128, of_256=True, table=IQ4),
}


class Planes(NamedTuple):
    """The memory of a matrix. A lane of a step has two inputs: its place of the first 32 inputs, and of the second."""

    low: Tensor  # uint8 [steps, outputs, lanes] two integers of 4 bits; [steps, 2, outputs, lanes] of 8 bits
    high: Tensor  # uint8 [bytes, outputs, lanes] the other bits of 5 and 6, of 4 or 2 steps a byte; else of no size
    fine: Tensor  # int32 [words, steps, outputs] two float16 scales (MXFP4: bfloat16), then minimums; of 256: 4 bytes
    coarse: Tensor  # int32 [blocks, outputs] scale and minimum of 256 inputs in float16; else of no size


OUTPUT_DIMS = -2, -2, -1, -1  # of the planes


class GPUPackedWeight(Tensor):
    """A bfloat16 matrix [out, in], or a stack of them, held as GGUF blocks: the numbers of the `PackedWeight` it is of.

    Our kernels for GPUs multiply by it without expanding it in memory, those of linear layers and experts of any model,
    too; any other operation works on an expanded copy. The outputs of a stack's matrices follow one another.
    """

    planes: Planes
    format: GGMLQuantizationType

    @staticmethod
    def __new__(cls, planes: Planes, format: GGMLQuantizationType, shape: tuple[int, ...]) -> GPUPackedWeight:
        packed = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16, device=planes.low.device)  # pyright: ignore[reportAttributeAccessIssue]
        packed.planes, packed.format = planes, format
        packed._is_param = True
        return packed

    @classmethod
    def from_packed(cls, weight: PackedWeight, device: torch.device | str) -> GPUPackedWeight:
        """The same on a device, of a matrix or a stack that `can_pack` allows."""
        assert can_pack(weight)
        if weight.ndim == 3:
            stack = cls.joined([cls.from_packed(weight.matrix(number), device) for number in range(len(weight))])
            return cls(stack.planes, weight.format, tuple(weight.shape))
        (outputs, inputs), layout = weight.shape, LAYOUTS[weight.format]
        groups, blocks = len(weight.rows), inputs // (256 if layout.of_256 else 32)
        rows = weight.rows.to(device)
        own = (2 if layout.minimums or layout.halves else 1) * 8 if layout.of_256 else 0
        wholes = 1 if weight.format is Q.MXFP4 else 4 if layout.minimums else 2
        scales = rows[:, : blocks * (wholes + own) * GROUP_OUTPUTS].view(groups, blocks, wholes + own, GROUP_OUTPUTS)
        start = -(-scales[0].numel() // 64) * 64
        integers = _integers(rows[:, start:].view(groups, inputs // 32, -1), layout)
        padding = -groups * GROUP_OUTPUTS % TILE_OUTPUTS

        def padded(x: Tensor, dim: int) -> Tensor:
            """With outputs up to a multiple of TILE_OUTPUTS, whose numbers are 0."""
            missing = list(x.shape)
            missing[dim] = padding
            return torch.cat([x, x.new_zeros(missing)], dim).contiguous() if padding else x.contiguous()

        low, high = _integer_planes(integers, layout.kept_bits)
        fine, coarse = _scale_planes(scales, wholes, weight.format, inputs // STEP)
        planes = Planes(padded(low, -2), padded(high, -2), padded(fine, -1), padded(coarse, -1))
        return cls(planes, weight.format, (outputs, inputs))

    @classmethod
    def joined(cls, weights: Sequence[GPUPackedWeight]) -> GPUPackedWeight:
        """The outputs of matrices of one format after each other; these become views of its memory."""
        assert all(weight.fills_tiles and weight.format == weights[0].format for weight in weights)
        by_plane = zip(*(weight.planes for weight in weights), strict=True)
        planes = Planes(*(torch.cat(each, dim) for each, dim in zip(by_plane, OUTPUT_DIMS, strict=True)))
        start = 0
        for weight in weights:
            weight.planes = Planes(
                *(each.narrow(dim, start, len(weight)) for each, dim in zip(planes, OUTPUT_DIMS, strict=True))
            )
            start += len(weight)
        return cls(planes, weights[0].format, (start, weights[0].shape[1]))

    @property
    def fills_tiles(self) -> bool:
        """True if there are no outputs beyond its own in memory."""
        return len(self) % TILE_OUTPUTS == 0

    @property
    def block_layout(self) -> BlockLayout:
        """Of its format."""
        return LAYOUTS[self.format]

    @property
    def nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The size in memory, not that of the matrix that it stands for."""
        return sum(each.nbytes for each in self.planes)

    def __repr__(self, **_: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"GPUPackedWeight({tuple(self.shape)}, {self.format.name})"

    def dequantize(self) -> Tensor:
        """The matrix in bfloat16."""
        low, high, fine, coarse = self.planes
        layout, bits = self.block_layout, self.block_layout.kept_bits
        if bits == 8:
            pair = low.transpose(0, 1)
        else:
            pair = torch.stack([low & 15, low >> 4])
            if bits > 4:
                more = torch.stack([high >> 2 * (bits - 4) * part for part in range(4 // (bits - 4))], 1).flatten(0, 1)
                more, mask = more[: len(low)], (1 << bits - 4) - 1
                pair = pair | torch.stack([more & mask, more >> bits - 4 & mask]) << 4
        numbers = pair.float() - layout.zero
        scale, minimum = (
            each.repeat_interleave(LANES // 2, -1) for each in _scales(fine, coarse, layout, self.format)
        )  # [2, steps, outputs, lanes]: as the integers
        expanded = (numbers * scale + minimum).to(torch.bfloat16).permute(2, 1, 0, 3)
        return expanded.flatten(1)[: self.shape[:-1].numel()].contiguous().view(self.shape)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return GPUPackedWeight(args[0].planes, args[0].format, tuple(args[0].shape))
        expanded = tree_map_only(GPUPackedWeight, GPUPackedWeight.dequantize, (tuple(args), kwargs or {}))
        return func(*expanded[0], **expanded[1])

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if (
            func is F.linear
            and not kwargs
            and args[0].dtype == torch.bfloat16
            and not (torch.is_grad_enabled() and args[0].requires_grad)
        ):
            return _linear(*args)
        with torch._C.DisableTorchFunctionSubclass():  # the results are plain tensors
            return func(*args, **(kwargs or {}))


def _linear(x: Tensor, weight: GPUPackedWeight, bias: Tensor | None = None) -> Tensor:
    from saltus.models.cuda import linear_kernels

    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = linear_kernels.product(rows, weight, len(rows)).view(*x.shape[:-1], -1)
    return out if bias is None else out + bias


def joined_packed(weights: Sequence[Tensor]) -> list[Tensor]:
    """The same weights, neighbours of one format as one."""
    joined: list[Tensor] = []
    for kind, group in groupby(weights, _kind_to_join):
        alike = list(group)
        packed = [weight for weight in alike if isinstance(weight, GPUPackedWeight)]
        joined += [GPUPackedWeight.joined(packed)] if kind is not None and len(packed) > 1 else alike
    return joined


def _kind_to_join(weight: Tensor) -> GGMLQuantizationType | None:
    return weight.format if isinstance(weight, GPUPackedWeight) and weight.fills_tiles else None


def can_pack(weight: PackedWeight) -> bool:
    """True for matrices, and stacks of them, of formats and sizes that the kernels for GPUs read."""
    fills_tiles = weight.ndim == 2 or (weight.ndim == 3 and weight.shape[1] % TILE_OUTPUTS == 0)
    readable = weight.format in LAYOUTS and weight.arithmetic == "int8" and not weight.is_transposed
    return readable and fills_tiles and weight.shape[-1] % STEP == 0


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


def _scale_planes(scales: Tensor, wholes: int, format: GGMLQuantizationType, steps: int) -> tuple[Tensor, Tensor]:
    """`Planes.fine` and `coarse` of the scales [groups, blocks, bytes, outputs] of a group."""
    outputs = len(scales) * GROUP_OUTPUTS

    def halves(part: Tensor) -> Tensor:
        """int16 [blocks, outputs] of the bytes of float16 numbers, which stand side by side."""
        return part.flatten(2).view(torch.int16).transpose(0, 1).flatten(1)

    if format is Q.MXFP4:
        exponents = scales[:, :, 0].transpose(0, 1).flatten(1).int() - 1  # half of 2^(e − 127), as bfloat16
        words = [torch.where(exponents > 0, exponents << 7, 0x40 >> -exponents.clamp(max=0)).to(torch.int16)]
    else:
        words = [halves(scales[:, :, start : start + 2]) for start in range(0, wholes, 2)]
    if not LAYOUTS[format].of_256:
        by_step = torch.stack([word.unflatten(0, (steps, 2)) for word in words])  # [words, steps, 2, outputs]
        return _words(by_step.movedim(2, -1)), scales.new_empty(0, outputs, dtype=torch.int32)
    coarse = torch.stack([words[0], words[1] if len(words) > 1 else torch.zeros_like(words[0])], -1)
    own = scales[:, :, wholes:].unflatten(2, (8, -1))  # [groups, blocks, numbers, bytes, outputs]
    if own.shape[3] == 1:
        own = torch.cat([own, torch.zeros_like(own)], 3)
    own = own.permute(1, 2, 0, 4, 3).reshape(steps, 2, outputs, 2).transpose(1, 2).flatten(2)
    return _words(own)[None], _words(coarse)


def _words(parts: Tensor) -> Tensor:
    """The parts [.., parts of 4 bytes] as int32 [..]."""
    return parts.contiguous().view(torch.int32).squeeze(-1)


def _scales(fine: Tensor, coarse: Tensor, layout: BlockLayout, format: GGMLQuantizationType) -> tuple[Tensor, Tensor]:
    """Scales and minimums [2, steps, outputs, 2], float32, of both halves of both 32 inputs of a step."""
    kind = torch.bfloat16 if format is Q.MXFP4 else torch.float16
    if not layout.of_256:
        numbers = fine[..., None].contiguous().view(kind).float().movedim(-1, 1)  # [words, 2, steps, outputs]
        scale = numbers[0]
        minimum = numbers[1] if layout.minimums else torch.zeros_like(scale)
        return scale[..., None].expand(-1, -1, -1, 2), minimum[..., None].expand(-1, -1, -1, 2)
    whole, least = (
        each[:, None].expand(-1, 4, -1).flatten(0, 1)[: fine.shape[1], :, None]
        for each in coarse[..., None].contiguous().view(kind).float().unbind(-1)
    )  # [steps, outputs, 1]
    own = fine[0][..., None].contiguous().view(torch.uint8).unflatten(-1, (2, 2)).movedim(-2, 0)  # as what is returned
    if layout.halves and layout.minimums:
        return whole * (own & 15).float(), -(least * (own >> 4).float())
    if layout.minimums:
        return (whole * own[..., :1].float()).expand(own.shape), -(least * own[..., 1:].float()).expand(own.shape)
    signed = (own if layout.halves else own[..., :1].expand(own.shape)).contiguous().view(torch.int8)
    return whole * signed.float(), torch.zeros(own.shape, device=own.device)
