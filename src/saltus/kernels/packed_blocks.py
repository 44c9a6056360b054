"""Arrange the quantised blocks of a GGUF file as the compiled kernels read them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Literal

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from gguf.quants import quantize
from torch import Tensor

from saltus.kernels import native
from saltus.kernels.native import structs

Q = GGMLQuantizationType
# Of blocks of 32, which are rearranged: the scales and minimums that they begin with, and bytes of each.
SCALES_OF_A_BLOCK = {
    Q.Q4_0: (1, 2), Q.Q4_1: (2, 2), Q.Q5_0: (1, 2), Q.Q5_1: (2, 2), Q.Q8_0: (1, 2), Q.IQ4_NL: (1, 2), Q.MXFP4: (1, 1)
}  # fmt: skip
PAIRED_FORMATS = (Q.Q4_0, Q.Q4_1, Q.IQ4_NL, Q.MXFP4)  # of these, integers of 4 bits
CODEBOOKS: dict[GGMLQuantizationType, Any] = {  # the formats that look up several weights at a time
    Q.IQ1_S: quants.IQ1_S, Q.IQ1_M: quants.IQ1_M, Q.IQ2_XXS: quants.IQ2_XXS, Q.IQ2_XS: quants.IQ2_XS,
    Q.IQ2_S: quants.IQ2_S, Q.IQ3_XXS: quants.IQ3_XXS, Q.IQ3_S: quants.IQ3_S
}  # fmt: skip
RECODED_FORMATS = (Q.TQ1_0, Q.TQ2_0, *CODEBOOKS)  # whose weights become 4-bit indices into a table (recoding.c)
RECODED_BLOCK = 256  # weights
PACKED_FORMATS = (
    Q.F16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.IQ4_NL, Q.IQ4_XS, Q.MXFP4,
    *RECODED_FORMATS
)  # fmt: skip


class OwnFormat(IntEnum):
    """Formats that GGUF does not have, by the kernels' numbers (packed_weights.h)."""

    FP8 = 60


Format = GGMLQuantizationType | OwnFormat
FP8_BLOCK = 128  # inputs that share a scale
Arithmetic = Literal["int8", "bf16"]
ARITHMETICS: tuple[Arithmetic, ...] = ("int8", "bf16")
INTERLEAVED = 64  # integer_weights.h
GROUP_OUTPUTS = 16


def loaded_kernels() -> Any:
    """The compiled kernels, which make and read packed weights."""
    kernels = native.load_kernels()
    assert kernels is not None, "packed weights are made only where there are compiled kernels"
    return kernels


def rearrange_blocks(blocks: Tensor, format: GGMLQuantizationType) -> Tensor:
    """The blocks of a GGUF file [out, bytes of a row] as the kernels read them, in as many bytes.

    The scales of a row come before the integers of its blocks, so that few instructions widen them to float32. Integers
    of 4 bits are paired: the first of two blocks is the low halves of 32 bytes, the second the high ones.
    """
    if format not in SCALES_OF_A_BLOCK:
        return blocks
    scales, size = SCALES_OF_A_BLOCK[format]
    by_block = blocks.unflatten(1, (-1, GGML_QUANT_SIZES[format][1]))
    firsts = by_block[:, :, : scales * size].unflatten(2, (scales, size)).transpose(1, 2).flatten(1)
    integers = by_block[:, :, scales * size :].flatten(1)
    if format in PAIRED_FORMATS:
        pairs = integers[:, : integers.shape[1] // 32 * 32].unflatten(1, (-1, 2, 16))  # a view: of rows, pairs, blocks
        first, second = pairs.unbind(2)
        low, high = first & 15 | second << 4, first >> 4 | second & 0xF0
        pairs[:, :, 0], pairs[:, :, 1] = low, high
    return torch.cat([firsts, integers], 1)


def recode_blocks(blocks: Tensor, format: GGMLQuantizationType) -> Tensor:
    """The blocks of a GGUF file [.., bytes of a row] of one of the RECODED_FORMATS as recoding.c describes: as many."""
    blocks, (weights, size) = blocks.contiguous(), GGML_QUANT_SIZES[format]
    per_row = blocks.shape[-1] // size
    out = torch.empty(*blocks.shape[:-1], per_row * packed_bytes(int(format), 1, weights), dtype=torch.uint8)
    codebook = _codebook(format) if format in CODEBOOKS else None
    recoding = structs.Recoding(
        blocks=blocks.data_ptr(), codebook=None if codebook is None else codebook.ctypes.data, out=out.data_ptr(),
        format=int(format), count=blocks.numel() // size,
    )  # fmt: skip
    loaded_kernels().saltus_recode(ctypes.byref(recoding))
    return out


@functools.cache
def _codebook(format: GGMLQuantizationType) -> np.ndarray:
    """The codebook of a format, uint8 [entries, 4 or 8]: the place of each number among those that it has."""
    CODEBOOKS[format].init_grid()
    grid = CODEBOOKS[format].grid
    return np.unique(grid, return_inverse=True)[1].reshape(grid.shape[-2:]).astype(np.uint8)


def interleave_blocks(
    blocks: Tensor, format: GGMLQuantizationType, new_memory: Callable[[int], Tensor] | None = None
) -> Tensor:
    """The blocks of a GGUF file as integer_weights.h describes: [groups, bytes of a group].

    `blocks` are those of a matrix [out, bytes of a row] or of a stack [matrices, out, bytes of a row], each of whose
    matrices begins with a group of its own; of a format that is recoded, those of `recode_blocks`.
    """
    weights = RECODED_BLOCK if format is Q.NVFP4 else GGML_QUANT_SIZES[format][0]
    size = packed_bytes(int(format), 1, weights)
    outs, inputs = blocks.shape[-2], blocks.shape[-1] // size * weights
    stack = blocks.contiguous().view(-1, outs, blocks.shape[-1])
    matrix = packed_bytes(int(format) + INTERLEAVED, outs, inputs)
    size = len(stack) * matrix
    out = torch.zeros(size, dtype=torch.uint8) if new_memory is None else new_memory(size)
    for from_matrix, to in zip(stack, out.view(len(stack), matrix), strict=True):
        interleaving = structs.Interleaving(
            blocks=from_matrix.data_ptr(), out=to.data_ptr(), format=int(format), outs=outs, inputs=inputs
        )
        loaded_kernels().saltus_interleave(ctypes.byref(interleaving))
    return out.view(len(stack) * -(-outs // GROUP_OUTPUTS), -1)


def packed_bytes(kernel_format: int, rows: int, inputs: int) -> int:
    """The bytes of `rows` rows of a packed weight (`PackedWeight.kernel_format`): where the rows after them begin.

    Rows of interleaved integers begin only at multiples of GROUP_OUTPUTS.
    """
    return loaded_kernels().saltus_packed_bytes(*map(structs.INTEGER, (kernel_format, rows, inputs)))


def blocks_shape(shape: Sequence[int], format: GGMLQuantizationType) -> tuple[int, ...]:
    """Of the blocks of matrices of this shape [.., out, in]: [.., out, bytes of a row]."""
    weights, size = GGML_QUANT_SIZES[format]
    return (*shape[:-1], shape[-1] // weights * size)


def quantized_blocks(weight: Tensor, format: GGMLQuantizationType) -> Tensor:
    """The blocks of a matrix [out, in] in a GGUF file, uint8 [out, bytes of a row], or of a stack, matrix by matrix."""
    made = torch.empty(blocks_shape(weight.shape, format), dtype=torch.uint8)
    for matrix, blocks in zip(weight, made, strict=True) if weight.ndim == 3 else [(weight, made)]:
        quantized = quantize(matrix.detach().float().contiguous().numpy(), format)
        blocks.copy_(torch.from_numpy(np.array(quantized)).view_as(blocks))
    return made
