"""Keep weight matrices in the quantised blocks of a GGUF file, as tensors that stand for the expanded matrices."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map_only

from saltus.kernels import native
from saltus.kernels.native import structs
from saltus.kernels.packed_blocks import (
    FP8_BLOCK,
    GROUP_OUTPUTS,
    INTERLEAVED,
    RECODED_BLOCK,
    RECODED_FORMATS,
    Arithmetic,
    Format,
    OwnFormat,
    Q,
    interleave_blocks,
    loaded_kernels,
    packed_bytes,
    rearrange_blocks,
    recode_blocks,
)

ATEN = torch.ops.aten
KEPT_PACKED = {ATEN.detach.default, ATEN.alias.default, ATEN.clone.default}
JOINS = {ATEN.stack.default, ATEN.cat.default}


class PackedWeight(Tensor):
    """A bfloat16 matrix [out, in], or a stack of them [matrices, out, in], held as GGUF blocks or 8-bit floats.

    Its numbers are those of dequantising in float32 and rounding. The compiled kernels multiply by it without expanding
    it in memory, and selecting rows expands only these; any other operation works on an expanded copy. With the
    `arithmetic` "bf16" a product multiplies these numbers, and `rows` [out, bytes of a row] is arranged by
    `rearrange_blocks`; with "int8" it multiplies the integers of the blocks by activations of 8 bits
    (docs/exactness.md), and `rows` [groups, bytes of a group] is arranged by `interleave_blocks`. The matrices of a
    stack follow one another, `matrix_bytes` each, and `stack[i]` is one of them in the same memory.

    `flipped()` stands for [.., in, out] in the same memory, for a model that wants it so; no kernel reads that. Stacks
    and concatenated outputs of one format stay packed, where groups are whole.
    """

    rows: Tensor
    format: Format
    arithmetic: Arithmetic
    is_transposed: bool

    @staticmethod
    def __new__(
        cls,
        rows: Tensor,
        format: Format,
        shape: tuple[int, ...],
        arithmetic: Arithmetic,
        is_transposed: bool = False,
    ) -> PackedWeight:
        packed = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16, device=rows.device)  # pyright: ignore[reportAttributeAccessIssue]
        packed.rows, packed.format, packed.arithmetic, packed.is_transposed = rows, format, arithmetic, is_transposed
        packed._is_param = True  # as torch.nn.Parameter would set; that would import torch.distributed for a subclass
        return packed

    @classmethod
    def from_blocks(
        cls,
        blocks: Tensor,
        format: GGMLQuantizationType,
        arithmetic: Arithmetic = "bf16",
        new_memory: Callable[[int], Tensor] | None = None,
    ) -> PackedWeight:
        """The matrix of the blocks of a GGUF file [out, bytes of a row], or the stack of [matrices, out, bytes of one].

        What is neither recoded nor rearranged shares their memory; what is interleaved lies in `new_memory`, zeros
        of a number of bytes. F16 holds no integers: its arithmetic is always "bf16".
        """
        weights, size = GGML_QUANT_SIZES[format]
        shape = (*blocks.shape[:-1], blocks.shape[-1] // size * weights)
        if format in RECODED_FORMATS:
            blocks = recode_blocks(blocks, format)
        return cls._of_shape(blocks, format, shape, arithmetic, new_memory)

    @classmethod
    def from_four_bit_floats(
        cls, floats: Tensor, scales: Tensor, of_all: Tensor, arithmetic: Arithmetic
    ) -> PackedWeight:
        """NVFP4, a matrix or a stack: floats of 4 bits (E2M1) times an 8-bit float of each 16 inputs times one of all.

        `floats` [.., out, in] are the bits of one in each byte, `scales` [.., out, in / 16] E4M3 and not negative,
        `of_all` [1] in float32, or of each matrix or output: [.., 1 or out, 1]. Inputs are a multiple of RECODED_BLOCK.
        """
        by_block = floats.unflatten(-1, (-1, RECODED_BLOCK // 32, 2, 16))
        indices = (by_block[..., 0, :] | by_block[..., 1, :] << 4).flatten(-2)
        whole = of_all.expand(indices.shape[:-1])[..., None].contiguous().view(torch.uint8)
        own = scales.view(torch.uint8).unflatten(-1, (-1, RECODED_BLOCK // 16))
        blocks = torch.cat([whole, own, indices], -1).flatten(-2)
        return cls._of_shape(blocks, Q.NVFP4, tuple(floats.shape), arithmetic)

    @classmethod
    def from_eight_bit_floats(cls, floats: Tensor, scales: Tensor) -> PackedWeight:
        """The matrix or stack of 8-bit floats (E4M3) [.., out, in] times scales [.., out, in / FP8_BLOCK] in float32.

        Its arithmetic is always "bf16". No float may be NaN, and scales must be below 2⁸.
        """
        by_block = floats.view(torch.uint8).unflatten(-1, (-1, FP8_BLOCK))
        scale_bytes = scales.float().contiguous()[..., None].view(torch.uint8)
        rows = torch.cat([scale_bytes, by_block], -1).flatten(-2).flatten(0, -2)
        return cls(rows, OwnFormat.FP8, tuple(floats.shape), "bf16")

    @classmethod
    def _of_shape(
        cls,
        blocks: Tensor,
        format: GGMLQuantizationType,
        shape: tuple[int, ...],
        arithmetic: Arithmetic,
        new_memory: Callable[[int], Tensor] | None = None,
    ) -> PackedWeight:
        if arithmetic == "int8" and format is not Q.F16:
            return cls(interleave_blocks(blocks, format, new_memory), format, shape, "int8")
        return cls(rearrange_blocks(blocks.flatten(0, -2), format), format, shape, "bf16")

    def __repr__(self, **_: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"PackedWeight({tuple(self.shape)}, {self.format.name})"

    @property
    def kernel_format(self) -> int:
        """The number by which the kernels know the format and its arrangement."""
        return int(self.format) + (INTERLEAVED if self.arithmetic == "int8" else 0)

    @property
    def matrix_bytes(self) -> int:
        """The bytes of a matrix [out, in], hence from one of a stack to the next."""
        return packed_bytes(self.kernel_format, *self.shape[-2:])

    @property
    def nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The size of the blocks, not of the matrix that they stand for."""
        return self.rows.nbytes

    def dequantize(self, rows: Tensor | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The matrix or stack in bfloat16, or of a matrix some rows: [*rows.shape, in]."""
        if self.is_transposed:
            assert rows is None, "rows are of a matrix [out, in]"
            return self.flipped().dequantize().mT
        if self.ndim == 3:
            assert rows is None, "rows are of a matrix"
            whole = torch.empty(self.shape, dtype=torch.bfloat16, device="cpu")  # also where "meta" is the default
            for number in range(len(self)):
                whole[number] = self.matrix(number).dequantize()
            return whole
        shape = (*(self.shape[:1] if rows is None else rows.shape), self.shape[1])
        out = torch.empty(shape, dtype=torch.bfloat16, device="cpu")
        if rows is not None:
            rows = rows.to(torch.int64).contiguous()
            if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < len(self):
                raise IndexError(f"a row of {len(self)} was asked for by {int(rows.min())}…{int(rows.max())}")
        expansion = structs.Expansion(
            weight=self.rows.data_ptr(), out=out.data_ptr(), rows=None if rows is None else rows.data_ptr(),
            format=self.kernel_format, inputs=out.shape[-1], count=out.shape[:-1].numel(),
        )  # fmt: skip
        loaded_kernels().saltus_expand(ctypes.byref(expansion))
        return out

    def matrix(self, number: int) -> PackedWeight:
        """One of a stack, in the same memory."""
        height = self.rows.shape[0] // self.shape[0]
        rows = self.rows[range(self.shape[0])[number] * height :][:height]
        return PackedWeight(rows, self.format, tuple(self.shape[1:]), self.arithmetic, self.is_transposed)

    def flipped(self) -> PackedWeight:
        """The same with its last two dimensions transposed, in the same memory."""
        *stack, first, second = self.shape
        return PackedWeight(self.rows, self.format, (*stack, second, first), self.arithmetic, not self.is_transposed)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            from saltus.kernels.batch_invariant_ops import linear_by_kernel

            if (out := linear_by_kernel(*args, **kwargs)) is not None:
                return out
        with torch._C.DisableTorchFunctionSubclass():  # the results are plain tensors
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if (
            torch.is_inference_mode_enabled() and func.is_view
        ):  # a view of a tensor from outside must not be of this mode
            with torch.inference_mode(False):
                return cls.__torch_dispatch__(func, types, args, kwargs)
        if func in KEPT_PACKED and not kwargs:
            packed = args[0]
            rows = packed.rows.clone() if func is ATEN.clone.default else packed.rows
            return PackedWeight(rows, packed.format, tuple(packed.shape), packed.arithmetic, packed.is_transposed)
        if func is ATEN.select.int and args[0].ndim == 3 and args[1] == 0:
            return args[0].matrix(args[2])
        if func in JOINS and (joined := _joined(func, *args, **(kwargs or {}))) is not None:
            return joined
        if func is ATEN.embedding.default:
            return args[0].dequantize(args[1])
        if func is ATEN.index.Tensor and args[0].ndim == 2 and not args[0].is_transposed and _selects_rows(args[1]):
            return args[0].dequantize(torch.where(args[1][0] < 0, args[1][0] + len(args[0]), args[1][0]))
        if func._schema.is_mutable and any(isinstance(each, PackedWeight) for each in args[:1]):
            raise TypeError(f"packed weights cannot be changed in place ({func}); dequantize() gives a copy that can")
        expanded = tree_map_only(PackedWeight, PackedWeight.dequantize, (tuple(args), kwargs or {}))
        return func(*expanded[0], **expanded[1])


def _selects_rows(indices: Sequence[Tensor | None]) -> bool:
    (rows, *others) = indices
    return not others and rows is not None and rows.dtype in (torch.int32, torch.int64)


def _joined(func: Any, weights: Sequence[Any], dim: int = 0) -> PackedWeight | None:
    """Matrices as a stack, or the outputs of matrices or stacks after each other; None if they cannot stay packed."""
    first = weights[0]
    if not all(isinstance(each, PackedWeight) and not each.is_transposed for each in weights):
        return None
    if len({(each.format, each.arithmetic, each.shape[:-2], each.shape[-1]) for each in weights}) > 1:
        return None
    if func is ATEN.stack.default:
        if dim != 0 or first.ndim != 2 or len({each.shape for each in weights}) > 1:
            return None
        rows = torch.cat([each.rows for each in weights])
        return PackedWeight(rows, first.format, (len(weights), *first.shape), first.arithmetic)
    size = GROUP_OUTPUTS if first.arithmetic == "int8" else 1
    if dim % first.ndim != first.ndim - 2 or any(each.shape[-2] % size for each in weights):
        return None
    rows = torch.cat([each.rows.unflatten(0, (first.shape[:-2].numel(), -1)) for each in weights], 1).flatten(0, 1)
    outputs = sum(each.shape[-2] for each in weights)
    return PackedWeight(rows, first.format, (*first.shape[:-2], outputs, first.shape[-1]), first.arithmetic)


def dequantize_blocks(blocks: Tensor, format: GGMLQuantizationType) -> Tensor:
    """The bfloat16 numbers [out, in] of the blocks of a GGUF file [out, bytes of a row]."""
    if native.load_kernels() is not None:
        return PackedWeight.from_blocks(blocks, format).dequantize()
    return torch.from_numpy(np.array(dequantize(blocks.numpy(), format))).to(torch.bfloat16)


def select_rows(weight: Tensor, rows: Tensor) -> Tensor:
    """Rows of a matrix [out, in]: [*rows.shape, in]."""
    return weight.dequantize(rows) if isinstance(weight, PackedWeight) else F.embedding(rows, weight)


def select_outputs(weight: Tensor, outputs: slice) -> Tensor:
    """Some outputs of a matrix [out, in], as a view of its memory. Errors: ValueError if packed groups are cut."""
    if not isinstance(weight, PackedWeight):
        return weight.detach()[outputs]
    size = GROUP_OUTPUTS if weight.arithmetic == "int8" else 1
    if outputs.start % size or (outputs.stop % size and outputs.stop != len(weight)):
        raise ValueError(
            f"outputs {outputs.start} to {outputs.stop} of a packed matrix do not begin and end with groups"
        )
    rows = weight.rows[outputs.start // size : -(-outputs.stop // size)]
    return PackedWeight(rows, weight.format, (outputs.stop - outputs.start, weight.shape[1]), weight.arithmetic)


def kernel_arguments(weight: Tensor) -> tuple[int, int]:
    """The address of a weight for the compiled kernels, and the number of its format (0: its own dtype)."""
    if isinstance(weight, PackedWeight):
        assert not weight.is_transposed, "kernels read matrices [out, in]"
        return weight.rows.data_ptr(), weight.kernel_format
    return weight.data_ptr(), 0


def is_kernel_weight(weight: Any) -> bool:
    """True for a tensor that the compiled kernels can read where it lies."""
    return type(weight) in (Tensor, Parameter, PackedWeight)
