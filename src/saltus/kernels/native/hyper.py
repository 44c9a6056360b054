"""The operations of hyper.h and their struct, as ctypes."""

from __future__ import annotations

import ctypes

from saltus.kernels.native.altup import MAX_STREAMS
from saltus.kernels.native.structs import INTEGER, POINTER, REAL

__all__ = ["COLLAPSE_STREAMS", "MAX_STREAMS", "SPREAD_STREAMS", "HyperConnection"]

COLLAPSE_STREAMS, SPREAD_STREAMS = range(26, 28)  # kinds of Op


class HyperConnection(ctypes.Structure):
    """The struct `HyperConnection` of hyper.h, field for field."""

    _fields_ = [
        *((name, POINTER) for name in ("streams", "x", "gates", "mix", "base", "scale")),
        *((name, INTEGER) for name in ("size", "count", "outs", "rounds")),
        *((name, REAL) for name in ("epsilon", "least", "written_least", "magnitude")),
    ]
