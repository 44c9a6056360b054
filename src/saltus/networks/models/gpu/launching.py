"""Start kernels so that each begins while the one before it ends, on GPUs that can."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

OVERLAPS_FROM = (9, 0)  # compute capability with programmatic dependent launch


def kernel(*shared: str) -> Callable[[Callable[..., None]], Any]:
    """A kernel of which there is one binary for all values of the arguments named here, so that none rounds otherwise.

    Import hooks that check types wrap functions; Triton needs the one that was written.
    """
    return lambda function: triton.jit(inspect.unwrap(function), do_not_specialize=list(shared))


@kernel()
def begin(OVERLAP: tl.constexpr):
    """First statement of every kernel: let the next one start, and wait for what the one before wrote."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@cache
def launch_options(device: torch.device) -> dict[str, Any]:
    """Arguments of every launch on a device."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= OVERLAPS_FROM:
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}
