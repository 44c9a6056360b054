"""Compile the attention kernel for this machine, once, with the C compiler at hand; do without where there is none."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from hashlib import blake2b
from importlib.resources import files
from pathlib import Path

import torch

from saltus.networks.cache import cache_folder

log = logging.getLogger("saltus")

SYMBOLS = {torch.bfloat16: "attend_bf16", torch.float32: "attend_f32", torch.float16: "attend_f16"}
FLAGS = ["-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC"]


class Attention(ctypes.Structure):
    """The struct `Attention` of native.c, field for field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "value")),
        *(
            (name, ctypes.c_int64)
            for name in ("query_row", "query_head", "key_row", "key_head", "value_row", "value_head")
        ),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        ("capacity", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("out", "visible", "first")),
        *((name, ctypes.c_int64) for name in ("rows", "past", "heads", "kv_heads", "dim", "value_dim")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where no C compiler is found or SALTUS_NATIVE=0. Cached on disk by its source."""
    if os.environ.get("SALTUS_NATIVE", "1") == "0":
        return None
    source = files("saltus.networks").joinpath("native.c").read_bytes()
    compiler = next(
        (path for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name and (path := shutil.which(name))), None
    )
    key = blake2b(source + repr((FLAGS, compiler, _processor(), torch.__version__)).encode(), digest_size=8).hexdigest()
    target = cache_folder() / "native" / f"attention-{key}.so"
    if not target.exists():
        if compiler is None:
            log.warning("no C compiler found: attention falls back to a slower exact path; install gcc or clang")
            return None
        error = _compile(compiler, source, target)
        if error:
            log.warning("the attention kernel did not compile (%s): falling back to a slower exact path", error)
            return None
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        log.warning("the attention kernel did not load (%s): falling back to a slower exact path", error)
        return None


def kernel(dtype: torch.dtype, device: torch.device):
    """The compiled attention of a dtype, or None where it cannot serve."""
    if device.type != "cpu" or (found := library()) is None:
        return None
    return getattr(found, SYMBOLS.get(dtype, "none"), None)


def _compile(compiler: str, source: bytes, target: Path) -> str | None:
    """Compile into place atomically; returns what went wrong.

    Linked without an OpenMP library on purpose: the symbols resolve to the one that torch has loaded, so that
    both share one pool of threads.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            code, unit, made = Path(folder, "native.c"), Path(folder, "native.o"), Path(folder, "native.so")
            code.write_bytes(source)
            result = None
            for parallel in (["-fopenmp"] if torch.backends.openmp.is_available() else [], []):
                steps = (
                    [compiler, *FLAGS, *parallel, "-c", code, "-o", unit],
                    [compiler, "-shared", unit, "-o", made, "-lm"],
                )
                for step in steps:
                    result = subprocess.run(step, capture_output=True, text=True)
                    if result.returncode:
                        break
                else:
                    ctypes.CDLL(str(made))  # unresolved OpenMP symbols show here
                    os.replace(made, target)
                    return None
            assert result is not None
            return result.stderr.strip().splitlines()[-1] if result.stderr.strip() else "unknown error"
    except OSError as error:
        return str(error)


def _processor() -> str:
    """What `-march=native` depends on: a cache shared by unlike machines must not mix their kernels."""
    try:
        with open("/proc/cpuinfo") as info:
            return next((line for line in info if line.startswith("flags")), platform.processor())
    except OSError:
        return platform.platform() + platform.processor()
