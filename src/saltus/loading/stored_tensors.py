"""List all tensors in the files of a model's folder, and read single ones: also those that its model does not have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from saltus.kernels.packed_blocks import Arithmetic
from saltus.loading.gguf_index import GgufTensor, read_gguf_index
from saltus.loading.gguf_parts import check_end, check_part, map_file, read_weight, shape_of
from saltus.loading.model_folders import INDEX_FILE, read_safetensors_header, text_name, weight_files
from saltus.loading.quantised_weights import QuantisedCheckpoint, find_quantised

SAMPLED_ROWS = 32  # by which two matrices are compared


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, or the weight that several tensors there stand for."""

    shape: tuple[int, ...] | None  # None: only who reads it knows
    read: Callable[..., Tensor]  # all of it, or the numbers in the rows of a slice
    is_reshaped: bool = False  # the weight has another shape, with the numbers in the same order

    def seems_equal(self, other: StoredTensor) -> bool:
        """True if both have the same shape, and the same numbers in some rows."""
        if self.shape is None or other.shape is None:  # any row would be read with all others
            return torch.equal(self.read(), other.read())
        step = max(self.shape[0] // SAMPLED_ROWS, 1)
        return self.shape == other.shape and all(
            torch.equal(self.read(slice(row, row + 1)), other.read(slice(row, row + 1)))
            for row in range(0, self.shape[0], step)
        )


def stored_tensors(folder: Path, arithmetic: Arithmetic | None = None) -> dict[str, StoredTensor]:
    """The tensors of safetensors files by name; in a model that reads more than text those of its text part are called
    as in a model of text. Those of a GGUF file, by their names in Transformers, stay packed for an `arithmetic`, as do
    quantised weights of a checkpoint, which are listed by the names that the model has for them.
    None for files of other kinds.

    Errors: SourceError for a damaged file.
    """
    if (folder / INDEX_FILE).is_file():
        return _of_gguf(folder, arithmetic)
    if (quantised := find_quantised(folder)) is not None:
        return _of_quantised(quantised, arithmetic)
    tensors = {}
    for file in weight_files(folder):
        if file.suffix == ".safetensors":
            for name, entry in read_safetensors_header(file)[0].items():
                tensors[text_name(name)] = StoredTensor(tuple(entry["shape"]), partial(_read, file, name))
    return tensors


def _read(file: Path, name: str, rows: slice | None = None) -> Tensor:
    with safe_open(file, "pt") as opened:
        return opened.get_tensor(name) if rows is None else opened.get_slice(name)[rows]


def _of_quantised(checkpoint: QuantisedCheckpoint, arithmetic: Arithmetic | None) -> dict[str, StoredTensor]:
    def read(weight: Any, rows: slice = slice(None)) -> Tensor:
        return weight[rows]

    return {
        text_name(name): StoredTensor(
            tuple(weight.get_shape()) if hasattr(weight, "get_shape") else None, partial(read, weight)
        )
        for name, weight in checkpoint.weights(arithmetic).items()
    }


def _of_gguf(folder: Path, arithmetic: Arithmetic | None) -> dict[str, StoredTensor]:
    index = read_gguf_index(folder)
    contents = [map_file(file, folder) for file in index.files]
    return {
        name: StoredTensor(
            shape_of(name, parts), partial(_read_gguf, name, parts, index.files, contents, arithmetic),
            is_reshaped=any(part.is_reshaped for part in parts),
        )
        for name, parts in (index.weights | index.heads).items()
    }  # fmt: skip


def _read_gguf(
    name: str,
    parts: Sequence[GgufTensor],
    files: Sequence[Path],
    contents: Sequence[np.ndarray],
    arithmetic: Arithmetic | None,
    rows: slice | None = None,
) -> Tensor:
    for part in parts:
        check_part(name, part, files[part.part])
        check_end(part, len(contents[part.part]), files[part.part])
    if rows is not None:
        if len(parts) > 1 or parts[0].rows or parts[0].interleaved_heads or parts[0].is_transposed:
            return _read_gguf(name, parts, files, contents, None)[rows]
        parts = [_some_rows(parts[0], rows)]
    is_packed = arithmetic is not None and rows is None and len({part.format for part in parts}) == 1
    return read_weight(name, parts, contents, shape_of(name, parts), packed=is_packed, arithmetic=arithmetic or "bf16")


def _some_rows(part: GgufTensor, rows: slice) -> GgufTensor:
    start, stop, _ = rows.indices(part.shape[0])
    size = part.size // part.shape[0]
    shape = (stop - start, *part.shape[1:])
    return replace(part, shape=shape, offset=part.offset + start * size, size=shape[0] * size)
