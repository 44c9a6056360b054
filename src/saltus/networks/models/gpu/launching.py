"""Declare kernels of which there is one binary for calls of all sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton


def kernel(*shared: str) -> Callable[[Callable[..., None]], Any]:
    """A kernel with one binary for all values of the arguments named here, so that none of them changes its rounding.

    Import hooks that check types wrap functions; Triton needs the one that was written.
    """
    return lambda function: triton.jit(inspect.unwrap(function), do_not_specialize=list(shared))
