"""Read a weight from the tensors of a GGUF file that make it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from saltus.kernels.packed_blocks import PACKED_FORMATS, Arithmetic
from saltus.kernels.packed_weight import PackedWeight, dequantize_blocks
from saltus.loading.fetching import SourceError
from saltus.loading.gguf_files import READ_FORMATS
from saltus.loading.gguf_index import GgufTensor
from saltus.loading.quantised_numbers import FourBitFloats

Parts = Sequence[GgufTensor]
Q = GGMLQuantizationType
GREATEST_E4M3 = 0x7E  # the bits of the greatest number; those after it are none


def map_file(file: Path, folder: Path) -> np.ndarray:
    """The bytes of a file of a folder's weights, mapped into memory. Errors: SourceError."""
    try:
        return np.memmap(file, mode="c")  # private: nothing is ever written to the file
    except OSError as error:
        raise SourceError(f"the weights of {folder} are in {file}, which cannot be read ({error.strerror})") from error


def shape_of(name: str, parts: Parts) -> tuple[int, ...]:
    """The shape of a weight that these parts make, before it is reshaped; () if they do not fit together."""
    first, *others = (_part_shape(part) for part in parts)
    axis = len(first) - (1 if len(first) == 1 or is_bias(name) else 2)
    if any(len(shape) != len(first) for shape in others):
        return ()
    if any(shape[:axis] + shape[axis + 1 :] != first[:axis] + first[axis + 1 :] for shape in others):
        return ()
    return (*first[:axis], first[axis] + sum(shape[axis] for shape in others), *first[axis + 1 :])


def is_bias(name: str) -> bool:
    """True for the name of a bias, of which experts have a row each."""
    return name.endswith("bias")


def check_part(name: str, part: GgufTensor, file: Path) -> None:
    """Raise SourceError unless a part has as many bytes as its shape takes in its format, and the rows it names."""
    known = part.format in READ_FORMATS and part.shape and min(part.shape) > 0
    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType(part.format)] if known else (1, 0)
    if not known or part.shape[-1] % weights or part.size != math.prod(part.shape) // weights * size:
        raise SourceError(f"{file}: {name} has another size than {part.shape} takes in its format; fetch it again")
    heads = part.interleaved_heads
    is_row_of_blocks = weights > 1 and math.prod(part.shape[:-1]) == 1  # which cannot be cut into heads
    if len(part.scales) not in (0, math.prod(part.shape[:-2])):
        raise SourceError(f"{file}: {name} has {len(part.scales)} scales for {part.shape}; fetch it again")
    if part.offset < 0 or heads < 0 or (heads and (part.shape[0] % (2 * heads) or is_row_of_blocks)):
        raise SourceError(f"{file}: the place or heads of {name} are not possible; fetch it again")
    rows, dimensions = part.shape[0], len(part.shape)
    wrong_rows = any(not 0 <= start < stop <= rows for start, stop in part.rows)
    if wrong_rows or (part.rows and (dimensions > 2 or is_row_of_blocks)):
        raise SourceError(f"{file}: {name} has {rows:,} rows, other ones than it needs; fetch it again")


def check_end(part: GgufTensor, size: int, file: Path) -> None:
    """Raise SourceError unless a file of this size has all bytes of a part."""
    if size < (end := part.offset + part.size):
        raise SourceError(f"{file} is cut short ({size:,} of {end:,} bytes or more); copy or fetch it again")


def check_parts(name: str, parts: Parts, shape: tuple[int, ...], is_stack_transposed: bool, file: Path) -> None:
    """Raise SourceError unless parts make a weight of this shape."""
    found = shape_of(name, parts)
    if is_stack_transposed and len(found) == 3:
        found = (found[0], found[2], found[1])
    is_reshaped = bool(found) and any(part.is_reshaped for part in parts)
    if math.prod(found) != math.prod(shape) if is_reshaped else found != shape:
        raise SourceError(f"{file} lacks {name}, or has it in another shape than its architecture; fetch it again")


def read_weight(
    name: str,
    parts: Parts,
    contents: Sequence[np.ndarray],
    shape: tuple[int, ...],
    is_stack_transposed: bool = False,
    packed: bool = True,
    arithmetic: Arithmetic = "bf16",
    new_memory: Callable[[int], Tensor] | None = None,
) -> Tensor:
    """A weight as numbers of `shape`, or as the file's blocks, in `new_memory`; rows are in Transformers' order.

    Matrices of experts are stacks of three dimensions; a packed one is [experts, out, in], also where the parameter is
    not. Errors: SourceError for a packed stack whose parts have several formats.
    """
    formats, alternating = {part.format for part in parts}, parts[0].alternating
    rows = [_selected(_rows(contents[part.part], part), part) for part in parts]
    is_matrix = len(parts[0].shape) in (2, 3) and not is_bias(name)
    stays_packed = packed and is_matrix and all(part.is_stored_as_it_is for part in parts)
    if stays_packed and formats == {Q.NVFP4} and (floats := _four_bit_floats(rows, parts)).why_not_packed() is None:
        return floats.pack(arithmetic)
    if stays_packed and formats <= {*PACKED_FORMATS}:
        if len(formats) == 1:
            blocks = torch.from_numpy(_joined(rows, -2, alternating))
            return PackedWeight.from_blocks(blocks, GGMLQuantizationType(parts[0].format), arithmetic, new_memory)
        if len(parts[0].shape) == 3:
            names = " and ".join(GGMLQuantizationType(part.format).name for part in parts)
            raise SourceError(
                f"its {name} is stored as {names}, but must be in one format; take a file that has it so, or load this"
                " one with --weights bf16"
            )
    numbers = [_numbers(each, part).numpy() for each, part in zip(rows, parts, strict=True)]
    joined = torch.from_numpy(_joined(numbers, -1 if is_bias(name) else _axis_of_outputs(parts[0]), alternating))
    if is_stack_transposed and joined.ndim == 3:
        joined = joined.transpose(1, 2)
    return joined.reshape(shape)


def part_bytes(content: np.ndarray, part: GgufTensor) -> np.ndarray:
    """The bytes of a part in its file."""
    return content[part.offset : part.offset + part.size]


def _part_shape(part: GgufTensor) -> tuple[int, ...]:
    shape = part.shape
    if part.rows:
        shape = (sum(stop - start for start, stop in part.rows), *shape[1:])
    return (*shape[:-2], shape[-1], shape[-2]) if part.is_transposed and len(shape) > 1 else shape


def _rows(content: np.ndarray, part: GgufTensor) -> np.ndarray:
    """The bytes of a part's rows, [..., out, bytes of a row]."""
    numbers = part.shape[0] if part.rows else 1  # of a bias, of which some may be selected
    rows = part_bytes(content, part).reshape(*(part.shape[:-1] or (numbers,)), -1)
    if heads := part.interleaved_heads:
        pairs = rows.reshape(heads, part.shape[0] // heads // 2, 2, -1)
        rows = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
    return rows


def _selected(rows: np.ndarray, part: GgufTensor) -> np.ndarray:
    return np.concatenate([rows[start:stop] for start, stop in part.rows]) if part.rows else rows


def _axis_of_outputs(part: GgufTensor) -> int:
    """Kernels of convolutions are [.., outputs, 1, width], other weights [.., outputs, inputs]."""
    return -3 if len(part.shape) > 2 and part.shape[-2] == 1 else -2


def _joined(arrays: Sequence[np.ndarray], axis: int, alternating: bool) -> np.ndarray:
    if len(arrays) == 1:
        return np.asarray(arrays[0])
    axis %= arrays[0].ndim
    if not alternating:
        return np.concatenate(arrays, axis)
    shape = list(arrays[0].shape)
    shape[axis] *= len(arrays)
    return np.stack(arrays, axis + 1).reshape(shape)


def _numbers(rows: np.ndarray, part: GgufTensor) -> Tensor:
    """Of a part in float32, as Transformers has them."""
    blocks, format = torch.from_numpy(np.asarray(rows)), GGMLQuantizationType(part.format)
    if format is Q.NVFP4:
        numbers = _four_bit_floats([rows], [part]).expand()
    elif format in PACKED_FORMATS:
        numbers = dequantize_blocks(blocks, format).float()
    else:
        numbers = blocks.view(torch.float32 if format == GGMLQuantizationType.F32 else torch.bfloat16).float()
    numbers = numbers.reshape(-1) if len(part.shape) == 1 else numbers
    if part.added:
        numbers = numbers - part.added
    if part.is_negative_exponential or part.is_exponential:
        numbers = (numbers if part.is_exponential else -numbers).log()
    return numbers.transpose(-1, -2) if part.is_transposed else numbers


def _four_bit_floats(rows: Sequence[np.ndarray], parts: Parts) -> FourBitFloats:
    """The outputs of parts in NVFP4, whose rows these are: blocks of 64 weights, which have four scales."""
    alternating, joined = parts[0].alternating, []
    for arrays in zip(*map(_floats_and_scales, rows, parts), strict=True):
        joined.append(torch.from_numpy(_joined(arrays, -2, alternating)))
    floats, bits, of_all = joined
    return FourBitFloats(floats, bits.view(torch.float8_e4m3fn), of_all)


def _floats_and_scales(rows: np.ndarray, part: GgufTensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The bits of floats [.., out, in] and of scales [.., out, in / 16], and the scale of all [.., out, 1]."""
    blocks = rows.reshape(*rows.shape[:-1], -1, GGML_QUANT_SIZES[Q.NVFP4][1])
    bits, pairs = blocks[..., :4] & 0x7F, blocks[..., 4:].reshape(*blocks.shape[:-1], 4, 8)
    bits = np.where(bits > GREATEST_E4M3, 0, bits)  # as ggml reads what is no number
    floats = np.concatenate([pairs & 15, pairs >> 4], -1)  # of 16, a byte is one and the eighth after it
    of_all = np.array(part.scales or [1.0], np.float32).reshape(-1, *[1] * (rows.ndim - 1))
    whole = np.broadcast_to(of_all, (*rows.shape[:-1], 1)).copy()
    return floats.reshape(*rows.shape[:-1], -1), bits.reshape(*rows.shape[:-1], -1), whole
