"""Move a model's weights into memory of large pages, which a processor reads faster than memory of 4 KB pages."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saltus.kernels.packed_weight import PackedWeight

HUGE_PAGE = 2 << 20  # bytes
LEAST_BYTES = 4 * HUGE_PAGE  # of a model whose weights are moved
ALIGNMENT = 256  # bytes
CHUNK = 32 * HUGE_PAGE  # that memory for weights is asked for in
MEMORY_INFO = Path("/proc/meminfo")


class HugePages:
    """Memory in huge pages, for weights that are made one after the other; several threads may take from it."""

    def __init__(self) -> None:
        self._addresses: list[range] = []
        self._chunk: mmap.mmap | None = None
        self._begin = self._end = 0  # of what is left of the chunk
        self._lock = threading.Lock()

    def zeros(self, size: int) -> Tensor:
        """Bytes that are 0, uint8 [size], in a storage of their own."""
        if not size or os.environ.get("SALTUS_HUGE_PAGES", "1") == "0":
            return torch.zeros(size, dtype=torch.uint8)
        with self._lock:
            if self._chunk is None or self._begin + size > self._end:
                self._chunk = _huge_memory(max(size, CHUNK) + HUGE_PAGE)
                if self._chunk is None:
                    return torch.zeros(size, dtype=torch.uint8)
                self._begin, self._end = _first_huge_page(self._chunk), len(self._chunk)
                self._addresses.append(range(_address(self._chunk), _address(self._chunk) + self._end))
            taken = torch.frombuffer(self._chunk, dtype=torch.uint8, count=size, offset=self._begin)
            self._begin += _padded(size)
            return taken

    def __reduce__(self) -> tuple[type[HugePages], tuple[()]]:
        """Copies of a model have weights elsewhere, and none here."""
        return HugePages, ()

    def __contains__(self, tensor: Tensor) -> bool:
        return any(tensor.data_ptr() in addresses for addresses in self._addresses)


def place_in_huge_pages(model: Any) -> bool:
    """Move all weights of a module that lie on the CPU, and not yet in its `huge_pages`; True if they were moved.

    The processor then translates 512 times fewer addresses. Linux gives such pages on request (transparent huge pages,
    "madvise"). Where there are none, or memory is short, or SALTUS_HUGE_PAGES=0, weights stay where they are. Weights
    keep their values and identities; tied ones stay tied.
    """
    places: dict[tuple[int, torch.Size], list[Any]] = {}  # the parameters by their addresses: tied ones share one
    total, already = 0, getattr(model, "huge_pages", None) or HugePages()
    for parameter in model.parameters():
        tensor = _numbers(parameter)
        if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel() and tensor not in already:
            place = tensor.data_ptr(), tensor.shape
            total += 0 if place in places else _padded(tensor.nbytes)
            places.setdefault(place, []).append(parameter)
    if os.environ.get("SALTUS_HUGE_PAGES", "1") == "0" or total < LEAST_BYTES or total > available_bytes():
        return False
    memory = _huge_memory(total + HUGE_PAGE)
    if memory is None:
        return False
    offset = _first_huge_page(memory)
    for parameters in places.values():  # one after the other, so that the old memory can be given back
        tensor = _numbers(parameters[0])
        # a storage of its own: tensors that share one cannot be saved apart
        moved = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset).view(tensor.shape)
        moved.copy_(tensor)
        offset += _padded(tensor.nbytes)
        for parameter in parameters:
            if isinstance(parameter, PackedWeight):
                parameter.rows = moved
            else:
                parameter.data = moved
    return True


def _numbers(parameter: Any) -> Tensor:
    """The tensor that holds a parameter's numbers."""
    return parameter.rows if isinstance(parameter, PackedWeight) else parameter.data


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _huge_memory(size: int) -> mmap.mmap | None:
    """Zeroed memory that asks for huge pages; None where the system has no such request or no memory."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return None
    return memory


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def _first_huge_page(memory: mmap.mmap) -> int:
    """Where it begins in this memory."""
    return -_address(memory) % HUGE_PAGE


def available_bytes() -> float:
    """How much memory the system can still give; infinite if it does not say."""
    try:
        lines = MEMORY_INFO.read_text().splitlines()
    except OSError:
        return float("inf")
    kilobytes = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return float(next(kilobytes, "inf")) * 1024
