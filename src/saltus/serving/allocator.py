"""Have the C library give freed memory back to the system, so that a server's memory stays flat."""

from __future__ import annotations

import ctypes
import os

# Settings of mallopt (malloc.h of glibc) with what a server needs, and the variables by which users set them.
M_ARENA_MAX, M_MMAP_THRESHOLD = -8, -3
SETTINGS = {"MALLOC_ARENA_MAX": (M_ARENA_MAX, 2), "MALLOC_MMAP_THRESHOLD_": (M_MMAP_THRESHOLD, 1 << 20)}


def return_freed_buffers() -> None:
    """Map buffers of a megabyte or more one by one, and share two heaps among threads, where the C library is glibc.

    Otherwise each of a server's threads keeps a heap of its own, as large as the largest prompt that it ever tokenized,
    and the keys and values of texts that come and go leave gaps in them. A setting in the environment stays.
    """
    for name, (setting, value) in SETTINGS.items():
        try:
            if name not in os.environ:
                ctypes.CDLL(None).mallopt(setting, value)
        except (OSError, AttributeError, TypeError):  # another C library or system
            return
