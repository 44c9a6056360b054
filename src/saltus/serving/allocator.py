"""Have the C library give freed memory back to the system, so that a server's memory stays flat."""

from __future__ import annotations

import ctypes
import os

M_MMAP_THRESHOLD = -3  # of mallopt, in malloc.h of glibc
LEAST_MAPPED = 1 << 20  # bytes: a text's keys and values take megabytes


def return_freed_buffers() -> None:
    """Map buffers of a megabyte or more one by one, where the C library is glibc.

    Once it has freed a large buffer glibc takes such ones from its heaps, where the buffers of many texts that come
    and go leave gaps: a server of 64 clients then held 0.6 GB more. If MALLOC_MMAP_THRESHOLD_ is set, it stays.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    try:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LEAST_MAPPED)
    except (OSError, AttributeError, TypeError):  # another C library or system
        return
