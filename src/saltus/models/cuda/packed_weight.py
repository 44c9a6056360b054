"""Keep weight matrices on a GPU in blocks of a GGUF file or in 8-bit floats, arranged as the tiles of products read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from saltus.kernels.packed_weight import ATEN, JOINS, PackedWeight
from saltus.models.cuda.packed_planes import LAYOUTS, OUTPUT_DIMS, STEP, TILE_OUTPUTS, BlockLayout, Planes


class GPUPackedWeight(Tensor):
    """A bfloat16 matrix [out, in], or a stack of them, held as GGUF blocks or as 8-bit floats with scales.

    It stands for the numbers of the `PackedWeight` that it is of, or for float · scale, rounded once. Our kernels for
    GPUs multiply by it without expanding it in memory, those of linear layers and experts of any model, too; any other
    operation works on an expanded copy. The outputs of a stack's matrices follow one another.
    """

    planes: Planes
    block_layout: BlockLayout

    @staticmethod
    def __new__(cls, planes: Planes, layout: BlockLayout, shape: tuple[int, ...]) -> GPUPackedWeight:
        packed = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16, device=planes.low.device)  # pyright: ignore[reportAttributeAccessIssue]
        packed.planes, packed.block_layout = planes, layout
        packed._is_param = True
        return packed

    @classmethod
    def from_floats(cls, floats: Tensor, scales: Tensor, span: int) -> GPUPackedWeight:
        """Of 8-bit floats (E4M3) [.., out, in] and the scales [.., out, spans], below MAX_SCALE, of `span` inputs each.

        A span is a multiple of STEP, or all inputs; the last one may be cut. A stack's matrices fill tiles.
        """
        planes = Planes.of_floats(floats.flatten(0, -2), scales.flatten(0, -2))
        return cls(planes, BlockLayout(8, span=-(-span // STEP)), tuple(floats.shape))

    @classmethod
    def from_packed(cls, weight: PackedWeight | GPUPackedWeight, device: torch.device | str) -> GPUPackedWeight:
        """The same on a device, of a matrix or a stack that `can_pack` allows."""
        assert can_pack(weight)
        if isinstance(weight, GPUPackedWeight):
            return cls(Planes(*(each.to(device) for each in weight.planes)), weight.block_layout, tuple(weight.shape))
        if weight.ndim == 3:
            matrices = [cls.from_packed(weight.matrix(number), device) for number in range(len(weight))]
            planes = Planes.joined([matrix.planes for matrix in matrices])
        else:
            planes = Planes.of_blocks(weight.rows.to(device), weight.shape[1], weight.format)
        return cls(planes, LAYOUTS[weight.format], tuple(weight.shape))

    @classmethod
    def joined(cls, weights: Sequence[GPUPackedWeight]) -> GPUPackedWeight:
        """The outputs of matrices of one layout after each other; these become views of its memory."""
        assert all(weight.fills_tiles and weight.block_layout == weights[0].block_layout for weight in weights)
        planes, start = Planes.joined([weight.planes for weight in weights]), 0
        for weight in weights:
            weight.planes = Planes(
                *(each.narrow(dim, start, len(weight)) for each, dim in zip(planes, OUTPUT_DIMS, strict=True))
            )
            start += len(weight)
        return cls(planes, weights[0].block_layout, (start, weights[0].shape[1]))

    @property
    def fills_tiles(self) -> bool:
        """True if there are no outputs beyond its own in memory, also of each matrix of a stack."""
        return self.shape[-2] % TILE_OUTPUTS == 0

    @property
    def nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The size in memory, not that of the matrix that it stands for."""
        return sum(each.nbytes for each in self.planes)

    def __repr__(self, **_: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"GPUPackedWeight({tuple(self.shape)}, {self.block_layout})"

    def dequantize(self) -> Tensor:
        """The matrix in bfloat16."""
        return self.planes.expanded(self.block_layout)[: self.shape[:-1].numel()].view(self.shape)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (ATEN.detach.default, ATEN.alias.default):
            return GPUPackedWeight(args[0].planes, args[0].block_layout, tuple(args[0].shape))
        if func in JOINS and (joined := _joined(func, *args, **(kwargs or {}))) is not None:
            return joined
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
    from saltus.models.cuda.launching import launching_on

    rows = x.reshape(-1, x.shape[-1]).contiguous()
    with launching_on(x.device):
        out = linear_kernels.product(rows, weight, len(rows)).view(*x.shape[:-1], -1)
    return out if bias is None else out + bias


def _joined(func: Any, weights: Sequence[Any], dim: int = 0) -> GPUPackedWeight | None:
    """Matrices as a stack, or the outputs of matrices or stacks after each other; None if they cannot stay packed."""
    first = weights[0]
    if not all(isinstance(each, GPUPackedWeight) and each.fills_tiles for each in weights):
        return None
    if len({(each.block_layout, each.shape[:-2], each.shape[-1]) for each in weights}) > 1:
        return None
    *stack, _, inputs = first.shape
    if func is ATEN.stack.default:
        if dim != 0 or stack or len({each.shape for each in weights}) > 1:
            return None
        shape = (len(weights), *first.shape)
    elif dim % first.ndim != first.ndim - 2:
        return None
    else:
        shape = (*stack, sum(each.shape[-2] for each in weights), inputs)
    planes = Planes.joined([each.planes for each in weights], math.prod(stack))
    return GPUPackedWeight(planes, first.block_layout, shape)


def joined_packed(weights: Sequence[Tensor]) -> list[Tensor]:
    """The same weights, neighbours of one layout as one."""
    joined: list[Tensor] = []
    for kind, group in groupby(weights, _kind_to_join):
        alike = list(group)
        packed = [weight for weight in alike if isinstance(weight, GPUPackedWeight)]
        joined += [GPUPackedWeight.joined(packed)] if kind is not None and len(packed) > 1 else alike
    return joined


def _kind_to_join(weight: Tensor) -> BlockLayout | None:
    return weight.block_layout if isinstance(weight, GPUPackedWeight) and weight.fills_tiles else None


def can_pack(weight: PackedWeight | GPUPackedWeight) -> bool:
    """True for matrices, and stacks of them, of formats and sizes that our kernels for GPUs read."""
    readable = isinstance(weight, GPUPackedWeight) or (
        weight.format in LAYOUTS and weight.arithmetic == "int8" and not weight.is_transposed
    )
    fills_tiles = weight.ndim == 2 or (weight.ndim == 3 and weight.shape[1] % TILE_OUTPUTS == 0)
    return readable and fills_tiles and weight.shape[-1] % STEP == 0
