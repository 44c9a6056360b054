"""Compile the kernels for this machine once, by its C compiler; without a compiler there are none."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from importlib.resources import files

import numpy as np
import torch

from saltus.kernels.native.compiling import NO_COMPILER, compile_library, find_compilers
from saltus.kernels.native.processor import (
    allowed_processors,
    compiler_flags,
    lesser_flags,
    processor_features,
    request_amx,
)
from saltus.kernels.native.structs import INTEGER, POINTER, REAL
from saltus.storage.cache_files import is_own_file, make_private_folder
from saltus.storage.cache_folder import cache_folder

log = logging.getLogger("saltus")

KERNEL_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32", torch.float16: "f16"}
WITHOUT_KERNELS = "no compiled kernels; PyTorch computes instead, several times slower and with other rounding"


@lru_cache(maxsize=1)
def load_kernels() -> ctypes.CDLL | None:
    """The compiled kernels; None where no C compiler is found or SALTUS_NATIVE=0. Cached on disk by its source.

    SALTUS_ISA chooses an instruction set below the processor's own. Errors: ValueError for one that it lacks.
    """
    if os.environ.get("SALTUS_NATIVE", "1") == "0":
        return None
    folder = files(__name__)
    sources = {f.name: f.read_bytes() for f in folder.iterdir() if f.name.endswith((".c", ".h", ".inc"))}
    compilers = find_compilers()
    features = processor_features()
    flags = [
        *compiler_flags(features),
        *(["-DSLOW_BF16_PRODUCTS"] if "GenuineIntel" in features else []),  # linear_tile_either.inc
        *(["-DAMX_PERMITTED"] if request_amx(features) else []),  # linear_amx.inc
    ]
    settings = (sorted(sources.items()), flags, compilers[:1], features, torch.__version__)
    target = cache_folder() / "native" / f"{blake2b(repr(settings).encode(), digest_size=8).hexdigest()}.so"
    if error := make_private_folder(target.parent):
        log.warning("%s: %s", WITHOUT_KERNELS, error)
        return None
    if not is_own_file(target):
        sets = [flags, *lesser_flags(features)]  # of a compiler that is older than the processor
        commands = [[*compiler, *some] for some in sets for compiler in compilers]
        error = compile_library(commands, sources, target) if commands else NO_COMPILER
        if error:
            log.warning("%s: %s", WITHOUT_KERNELS, error)
            return None
    try:
        library = ctypes.CDLL(str(target))
    except OSError as error:
        log.warning("%s: %s", WITHOUT_KERNELS, error)
        return None
    library.saltus_packed_bytes.restype = INTEGER
    library.saltus_tree_rows.argtypes = POINTER, INTEGER, INTEGER, INTEGER, POINTER, POINTER
    library.saltus_set_beside.argtypes = POINTER, INTEGER, INTEGER, INTEGER, POINTER
    for suffix in KERNEL_SUFFIXES.values():
        if (gumbel_max := getattr(library, f"gumbel_max_{suffix}", None)) is not None:
            gumbel_max.argtypes, gumbel_max.restype = (
                (POINTER, INTEGER, REAL, ctypes.c_uint64, ctypes.c_uint64),
                INTEGER,
            )
            getattr(library, f"greatest_{suffix}").argtypes = POINTER, INTEGER, INTEGER, POINTER
    return library


def kernel(name: str, dtype: torch.dtype, device: torch.device) -> Callable[..., int] | None:
    """A compiled kernel for a dtype; most take a pointer to their struct. None where there is none."""
    if device.type != "cpu" or dtype not in KERNEL_SUFFIXES or (library := load_kernels()) is None:
        return None
    return getattr(library, f"{name}_{KERNEL_SUFFIXES[dtype]}", None)


def address(array: np.ndarray) -> int:
    """Where an array's memory begins; `array.ctypes.data` makes an object for it."""
    return array.__array_interface__["data"][0]


def share_threads() -> int:
    """Let the kernels use as many threads as torch does; for calls between which torch is not used.

    A container's share of the processors limits them. Returns torch's number.
    """
    threads = _torch_threads()
    if (library := load_kernels()) is not None:
        library.saltus_threads(INTEGER(min(threads, allowed_processors())))
    return threads


class kernel_threads_only:
    """Run torch on one thread while open: its threads would compete with those of the kernels."""

    def __enter__(self) -> None:
        self.threads = share_threads()
        if load_kernels() is not None:
            torch.set_num_threads(1)

    def __exit__(self, *_) -> None:
        torch.set_num_threads(self.threads)


class _Threads(threading.local):
    """What is known of a Python thread: has it asked for torch's number of threads before?"""

    asked = False
    last = 1  # that any Python thread had


_threads = _Threads()


def _torch_threads() -> int:
    """torch's number of threads; in a new Python thread, that of those before.

    A thread takes the number that torch has when it first uses it, which is 1 while another is in a call.
    """
    threads = torch.get_num_threads()
    if threads == 1 and not _threads.asked and _Threads.last > 1:
        threads = _Threads.last
        torch.set_num_threads(threads)
    _threads.asked, _Threads.last = True, threads
    return threads
