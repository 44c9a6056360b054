"""The operations of altup.h and their structs, as ctypes."""

from __future__ import annotations

import ctypes

from saltus.kernels.native.structs import INTEGER, POINTER, REAL

PREDICT_STREAMS, CORRECT_STREAMS, MATCH_MAGNITUDE, AVERAGE, CUT_OFF = range(21, 26)  # kinds of Op
MAX_STREAMS = 8


class AltUp(ctypes.Structure):
    """The struct `AltUp` of altup.h, field for field."""

    _fields_ = [
        ("streams", POINTER * MAX_STREAMS),
        *((name, POINTER) for name in ("predicted", "norm", "router", "predict", "correct")),
        *((name, INTEGER) for name in ("size", "count", "active")),
        ("epsilon", REAL),
    ]


class Magnitude(ctypes.Structure):
    """The struct `Magnitude` of altup.h, field for field."""

    _fields_ = [("x", POINTER), ("like", POINTER), ("size", INTEGER), ("least", REAL)]


class Average(ctypes.Structure):
    """The struct `Average` of altup.h, field for field."""

    _fields_ = [("x", POINTER * MAX_STREAMS), ("out", POINTER), ("size", INTEGER), ("count", INTEGER)]


class Cutoff(ctypes.Structure):
    """The struct `Cutoff` of altup.h, field for field."""

    _fields_ = [("x", POINTER), ("size", INTEGER), ("deviations", REAL)]
