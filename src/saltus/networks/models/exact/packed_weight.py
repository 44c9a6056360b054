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

from saltus.networks.models.exact import native

Q = GGMLQuantizationType
ATEN = torch.ops.aten
KEPT_PACKED = {ATEN.detach.default, ATEN.alias.default, ATEN.clone.default}
PACKED_FORMATS = (Q.F16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.Q4_K, Q.Q5_K, Q.Q6_K)


class PackedWeight(Tensor):
    """A bfloat16 matrix [out, in], held as GGUF blocks [out, bytes of a row].

    Its numbers are those of dequantising in float32 and rounding. The compiled kernels multiply by it without expanding
    it in memory, and selecting rows expands only these; any other operation works on an expanded copy.
    """

    blocks: Tensor
    format: GGMLQuantizationType

    @staticmethod
    def __new__(cls, blocks: Tensor, format: GGMLQuantizationType) -> PackedWeight:
        weights, size = GGML_QUANT_SIZES[format]
        shape = (blocks.shape[0], blocks.shape[1] // size * weights)
        packed = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16, device=blocks.device)  # pyright: ignore[reportAttributeAccessIssue]
        packed.blocks, packed.format = blocks, format
        packed._is_param = True  # as torch.nn.Parameter would set; that would import torch.distributed for a subclass
        return packed

    def __repr__(self, **_: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"PackedWeight({tuple(self.shape)}, {self.format.name})"

    @property
    def nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The size of the blocks, not of the matrix that they stand for."""
        return self.blocks.nbytes

    def dequantize(self, rows: Tensor | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The matrix in bfloat16, or some of its rows: [*rows.shape, in]."""
        return expand_blocks(self.blocks, self.format, rows)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (
            func is F.linear
            and args[0].dtype == torch.bfloat16
            and not (torch.is_grad_enabled() and args[0].requires_grad)
        ):
            from saltus.networks.models.exact.batch_invariant_ops import BatchInvariantMode

            with BatchInvariantMode():
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():  # the results are plain tensors
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in KEPT_PACKED and not kwargs:
            packed = args[0]
            blocks = packed.blocks.clone() if func is ATEN.clone.default else packed.blocks
            return PackedWeight(blocks, packed.format)
        if func is ATEN.embedding.default:
            return args[0].dequantize(args[1])
        if func is ATEN.index.Tensor and _selects_rows(args[1]):
            return args[0].dequantize(args[1][0])
        expanded = tree_map_only(PackedWeight, PackedWeight.dequantize, (tuple(args), kwargs or {}))
        return func(*expanded[0], **expanded[1])


def _selects_rows(indices: Sequence[Tensor | None]) -> bool:
    (rows, *others) = indices
    return not others and rows is not None and rows.dtype in (torch.int32, torch.int64)


def expand_blocks(blocks: Tensor, format: GGMLQuantizationType, rows: Tensor | None = None) -> Tensor:
    """The bfloat16 numbers of GGUF blocks [out, bytes]: [out, in], or [*rows.shape, in] of some rows."""
    weights, size = GGML_QUANT_SIZES[format]
    shape = blocks.shape[:1] if rows is None else rows.shape
    out = torch.empty(*shape, blocks.shape[1] // size * weights, dtype=torch.bfloat16)
    kernel = native.load_kernels()
    if kernel is None or blocks.device.type != "cpu":
        chosen = blocks if rows is None else blocks[rows.reshape(-1)]
        values = torch.from_numpy(np.array(dequantize(chosen.cpu().numpy(), format)))
        return values.to(torch.bfloat16).view(out.shape).to(blocks.device)
    rows = None if rows is None else rows.to(torch.int64).contiguous()
    if rows is not None and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < len(blocks):
        raise IndexError(f"a row of {len(blocks)} was asked for by {int(rows.min())}…{int(rows.max())}")
    expansion = native.Expansion(
        weight=blocks.data_ptr(), out=out.data_ptr(), rows=None if rows is None else rows.data_ptr(),
        format=int(format), inputs=out.shape[-1], count=shape.numel(),
    )  # fmt: skip
    kernel.saltus_expand(ctypes.byref(expansion))
    return out


def select_rows(weight: Tensor, rows: Tensor) -> Tensor:
    """Rows of a matrix [out, in]: [*rows.shape, in]."""
    return weight.dequantize(rows) if isinstance(weight, PackedWeight) else F.embedding(rows, weight)


def kernel_arguments(weight: Tensor) -> tuple[int, int]:
    """The address of a weight for the compiled kernels, and the number of its format (0: its own dtype)."""
    if isinstance(weight, PackedWeight):
        return weight.blocks.data_ptr(), int(weight.format)
    return weight.data_ptr(), 0


def describe_weights(model: Any) -> str:
    """The formats that a model's matrices are stored in, the one of most bytes first, such as "Q4_1, Q8_0"."""
    sizes: dict[str, int] = {}
    for weight in model.parameters():
        if weight.ndim >= 2:
            name = weight.format.name if isinstance(weight, PackedWeight) else str(weight.dtype).removeprefix("torch.")
            sizes[name] = sizes.get(name, 0) + weight.nbytes
    return ", ".join(sorted(sizes, key=lambda name: -sizes[name]))


def is_kernel_weight(weight: Any) -> bool:
    """True for a tensor that the compiled kernels can read where it lies."""
    return type(weight) in (Tensor, Parameter, PackedWeight)
