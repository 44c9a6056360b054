"""Read the header of a GGUF file: its metadata, and where its tensors lie.

The file may come from anybody. Each count is compared with the bytes that are left before anything is made of it, so
time and memory are bounded by the header's size.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

VERSIONS = (2, 3)
BIG_ENDIAN = "it is big-endian"
MAX_HEADER = 1 << 27  # bytes; a vocabulary of 262,144 tokens with merges takes less than 20 MB
MAX_DIMENSIONS = 4  # of a tensor in ggml
MAX_NESTING = 4  # of arrays
DEFAULT_ALIGNMENT = 32
FLOAT32 = GGUFValueType.FLOAT32.to_bytes(4, "little")
MAY_BE_INFINITE = ".activation_sparsity_scale"  # -infinity where Gemma 3n keeps all activations
NUMBER_FORMATS = {
    GGUFValueType.UINT8: "B", GGUFValueType.INT8: "b", GGUFValueType.UINT16: "H", GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I", GGUFValueType.INT32: "i", GGUFValueType.UINT64: "Q", GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f", GGUFValueType.FLOAT64: "d", GGUFValueType.BOOL: "?",
}  # fmt: skip


class UnknownVersionError(ValueError):
    """A file of another version of GGUF; its argument is the version."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a GGUF file and where it lies."""

    name: str
    format: GGMLQuantizationType
    shape: tuple[int, ...]  # as in PyTorch, the reverse of the file's order
    offset: int  # bytes from the file's start
    size: int  # bytes


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says of its model."""

    metadata: dict[str, Any]
    tensors: list[TensorInfo]
    floats: dict[str, int]  # where the numbers of settings that are lists in float32 begin


def read_gguf_header(file: Path) -> GgufHeader:
    """The header of a whole GGUF file of version 2 or 3, little-endian. Errors: ValueError that says what is wrong."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        fields = _FieldReader(content, min(len(content), MAX_HEADER))
        if fields.take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = fields.number("I")
        if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
            raise ValueError(BIG_ENDIAN)
        if version not in VERSIONS:
            raise UnknownVersionError(version)
        num_tensors, num_metadata = fields.number("Q"), fields.number("Q")
        metadata: dict[str, Any] = {}
        floats: dict[str, int] = {}
        for _ in range(fields.checked_count(num_metadata, 13)):
            key = fields.text()
            if key in metadata:
                raise ValueError(f"it has {key!r} twice")
            kind, begin = fields.number("I"), fields.position
            metadata[key] = fields.value(kind)
            if kind == GGUFValueType.ARRAY and content[begin : begin + 4] == FLOAT32:
                floats[key] = begin + 12  # after its type and its length
            if not key.endswith(MAY_BE_INFINITE) and not _is_finite(metadata[key]):
                raise ValueError(f"its {key} is no finite number")
        infos = [_tensor_info(fields) for _ in range(fields.checked_count(num_tensors, 24))]
        tensors = _placed(infos, _aligned(fields.position, metadata), len(content))
    return GgufHeader(metadata, tensors, floats)


class _FieldReader:
    """A position in the header, from which fields are read one after the other."""

    def __init__(self, content: mmap.mmap, end: int) -> None:
        self.content, self.end, self.position = content, end, 0

    def take(self, size: int) -> bytes:
        begin = self.position
        self.position += self.checked_count(size, 1)
        return self.content[begin : self.position]

    def checked_count(self, count: int, least: int) -> int:
        """The count, or ValueError if so many fields of at least `least` bytes are more than the rest of the header."""
        if count * least > self.end - self.position:
            raise ValueError(f"its header ends before {count:,} fields that it announces")
        return count

    def number(self, format: str) -> Any:
        return struct.unpack(f"<{format}", self.take(struct.calcsize(f"<{format}")))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8")

    def value(self, kind: int, nesting: int = 0) -> Any:
        """A value of metadata of one of GGUF's types."""
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind == GGUFValueType.ARRAY:
            if nesting == MAX_NESTING:
                raise ValueError(f"it has arrays in arrays, more than {MAX_NESTING}")
            return self._array(self.number("I"), self.number("Q"), nesting)
        return self.number(NUMBER_FORMATS[GGUFValueType(kind)])

    def _array(self, kind: int, count: int, nesting: int) -> list[Any]:
        if (format := NUMBER_FORMATS.get(GGUFValueType(kind))) is None:
            least = 8 if kind == GGUFValueType.STRING else 12
            return [self.value(kind, nesting + 1) for _ in range(self.checked_count(count, least))]
        size = struct.calcsize(f"<{format}")
        data = self.take(self.checked_count(count, size) * size)
        return list(struct.unpack(f"<{count}{format}", data))


def _is_finite(value: Any) -> bool:
    """False for a number that is infinite or not a number, and for an array that has one."""
    if isinstance(value, list):
        kinds = set(map(type, value))
        return not kinds & {float, list} or all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


MAX_FORMAT = 64  # larger numbers are of damaged files


class UnknownFormatError(ValueError):
    """A tensor is stored in a format that nothing here reads."""


def _tensor_info(fields: _FieldReader) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    """Name, shape, format and offset of a tensor; the offset counts from the end of the header."""
    name, dimensions = fields.text(), fields.number("I")
    if dimensions > MAX_DIMENSIONS:
        raise ValueError(f"{name} has {dimensions} dimensions")
    shape = tuple(fields.number("Q") for _ in range(dimensions))
    number = fields.number("I")
    if number < MAX_FORMAT and number not in {format.value for format in GGMLQuantizationType}:
        raise UnknownFormatError(f"it stores {name} in format {number} of GGML, which is not supported")
    return name, shape[::-1], GGMLQuantizationType(number), fields.number("Q")


def _aligned(position: int, metadata: dict[str, Any]) -> int:
    """Where the tensors' bytes begin after a header that ends at this position."""
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"its alignment is {alignment!r}, which is no power of two")
    return -(-position // alignment) * alignment


def _placed(
    infos: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]], begin: int, file_size: int
) -> list[TensorInfo]:
    """The tensors with their places in a file of this size, or ValueError if one does not lie in it."""
    if len({name for name, *_ in infos}) < len(infos):
        raise ValueError("it has tensors of the same name")
    placed = []
    for name, shape, format, offset in infos:
        weights, bytes_of_block = GGML_QUANT_SIZES[format]
        if shape and shape[-1] % weights:
            raise ValueError(f"{name} has rows of {shape[-1]:,} weights, which {format.name} does not store")
        size = math.prod(shape) // weights * bytes_of_block
        if begin + offset + size > file_size:
            raise ValueError(f"it is cut short, or {name} lies behind its end")
        placed.append(TensorInfo(name, format, shape, begin + offset, size))
    return placed
