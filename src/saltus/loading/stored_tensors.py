"""List all tensors in the files of a model's folder, and read single ones: also those that its model does not have."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from saltus.loading.model_folders import TEXT_PART_NAMES, read_safetensors_header, weight_files


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of safetensors files by name; in a model that reads more than text those of its text part are called
    as in a model of text. None for files of other kinds.

    Errors: SourceError for a damaged file.
    """
    tensors = {}
    for file in weight_files(folder):
        if file.suffix == ".safetensors":
            for name, entry in read_safetensors_header(file)[0].items():
                tensors[_text_name(name)] = StoredTensor(tuple(entry["shape"]), partial(_read, file, name))
    return tensors


def _text_name(name: str) -> str:
    for pattern, replacement in TEXT_PART_NAMES.items():
        name = re.sub(pattern, replacement, name)
    return name


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as opened:
        return opened.get_tensor(name)
