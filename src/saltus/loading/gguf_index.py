"""The index of a model folder whose weights are in a GGUF file: which tensors of the file make a weight."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from saltus.loading.fetching import SourceError
from saltus.loading.model_folders import INDEX_FILE
from saltus.models.gguf_architecture import Rows
from saltus.storage.cache_folder import cache_folder


@dataclass(frozen=True)
class GgufIndex:
    """The parts of a folder's GGUF file, and where its weights lie, by their names in Transformers."""

    files: list[Path]
    weights: dict[str, tuple[GgufTensor, ...]]  # of the model
    heads: dict[str, tuple[GgufTensor, ...]]  # of blocks after its last layer, which predict later tokens


@dataclass(frozen=True)
class GgufTensor:
    """Where a weight, or a part of one (see `TensorPart`), lies in a GGUF file."""

    format: int  # GGUF's number of its format
    shape: tuple[int, ...]  # as in PyTorch: [out, in] or [size]
    offset: int  # bytes from the file's start
    size: int  # bytes
    interleaved_heads: int = 0  # if rows of heads are interleaved: of queries and keys of the architecture llama
    part: int = 0  # of a file that is split, in which it lies
    added: int = 0  # to each number when it was stored
    rows: Rows = ()  # of a matrix or a bias, in turn; empty: all
    alternating: bool = False  # rows of the tensors that are joined
    is_transposed: bool = False
    is_negative_exponential: bool = False
    is_exponential: bool = False
    is_reshaped: bool = False
    scales: tuple[float, ...] = ()  # in float32: of a matrix in NVFP4, or of each of a stack; empty: 1

    @property
    def is_stored_as_it_is(self) -> bool:
        """True if its blocks are those of the weight, perhaps in another order."""
        is_logarithm = self.is_negative_exponential or self.is_exponential
        return not (self.added or self.is_transposed or is_logarithm or self.is_reshaped)


DEFAULTS = {field.name: field.default for field in fields(GgufTensor)}


Tensors = Mapping[str, Sequence[GgufTensor]]


def write_index(folder: Path, files: Sequence[str], weights: Tensors, heads: Tensors) -> None:
    """Write which tensors of the files make each weight, by its name in Transformers; see `GgufIndex`."""
    content: dict[str, Any] = {"file": files[0], "more_files": list(files[1:]), "tensors": _entries(weights)}
    if heads:
        content["heads"] = _entries(heads)
    (folder / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _entries(tensors: Tensors) -> dict[str, Any]:
    entries = {
        name: [{key: value for key, value in asdict(part).items() if value != DEFAULTS[key]} for part in parts]
        for name, parts in tensors.items()
    }
    return {name: parts[0] if len(parts) == 1 else parts for name, parts in entries.items()}


def read_gguf_index(folder: Path) -> GgufIndex:
    """The index of a folder.

    Errors: SourceError. Only an index in the cache of this machine may name a file in another folder.
    """
    try:
        content = json.loads((folder / INDEX_FILE).read_bytes())
        names = [str(name) for name in (content["file"], *content.get("more_files", ()))]
        weights, heads = (
            {
                key: tuple(_tensor(part) for part in (entry if isinstance(entry, list) else [entry]))
                for key, entry in entries.items()
            }
            for entries in (content["tensors"], content.get("heads", {}))
        )
        parts = [part for each in (*weights.values(), *heads.values()) for part in each]
        numbers = [x for part in parts for x in (part.format, *part.shape, part.offset, part.size)]
        numbers += [x for part in parts for x in (part.interleaved_heads, part.part, part.added)]
        numbers += [x for part in parts for rows in part.rows for x in rows]
        scales = [x for part in parts for x in part.scales]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SourceError(f"{folder / INDEX_FILE} is damaged ({error}); fetch the model again") from None
    if (
        not all((*weights.values(), *heads.values()))
        or not weights
        or any(type(number) is not int for number in numbers)
        or any(type(scale) is not float for scale in scales)
    ):
        raise SourceError(f"{folder / INDEX_FILE} is damaged (no numbers of weights); fetch the model again")
    if any(not 0 <= part.part < len(names) for part in parts):
        raise SourceError(f"{folder / INDEX_FILE} is damaged (a part that it does not name); fetch the model again")
    is_own = folder.resolve().parent == (cache_folder() / "gguf").resolve()
    outside = [name for name in names if Path(name).name != name or name == ".."]
    if not is_own and outside:
        raise SourceError(
            f"{folder / INDEX_FILE} names {outside[0]!r}, which is not a file of its folder; fetch the model again"
        )
    return GgufIndex([folder / name for name in names], weights, heads)


def _tensor(entry: Mapping[str, Any]) -> GgufTensor:
    rows = tuple((start, stop) for start, stop in entry.get("rows", ()))
    scales = tuple(entry.get("scales", ()))
    return GgufTensor(**{**entry, "shape": tuple(entry["shape"]), "rows": rows, "scales": scales})
