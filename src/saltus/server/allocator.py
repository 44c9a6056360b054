"""Have the C library give freed memory back to the system, so that a server's memory stays flat."""

from __future__ import annotations

import ctypes
import os

M_ARENA_MAX, M_MMAP_THRESHOLD = -8, -3  # settings of mallopt (malloc.h of glibc)
MEGABYTE = 1 << 20


def return_freed_buffers(threshold: int = MEGABYTE) -> None:
    """Map buffers of `threshold` bytes or more one by one, and share two heaps among threads, where there is glibc.

    Otherwise each of a server's threads keeps a heap of its own, as large as the largest prompt that it ever tokenized,
    and the keys and values of texts that come and go leave gaps in them. A setting in the environment stays. A higher
    threshold, at most 32 MB, saves time: every new mapping is filled with zeros.
    """
    settings = {"MALLOC_ARENA_MAX": (M_ARENA_MAX, 2), "MALLOC_MMAP_THRESHOLD_": (M_MMAP_THRESHOLD, threshold)}
    for name, (setting, value) in settings.items():
        try:
            if name not in os.environ:
                ctypes.CDLL(None).mallopt(setting, value)
        except (OSError, AttributeError, TypeError):  # another C library or system
            return


def return_free_memory() -> None:
    """Give what is free in all heaps back to the system, where there is glibc; it takes some milliseconds."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        return
