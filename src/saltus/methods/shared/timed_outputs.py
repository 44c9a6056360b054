"""Run a draft network's pass with kernel threads alone, and note how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from saltus.core.forward import ForwardOutputs
from saltus.kernels import native


def timed_outputs(run: Callable[[], Sequence[ForwardOutputs]], device: torch.device) -> list[ForwardOutputs]:
    """The outputs of a pass on this device, each with the seconds of the whole pass."""
    started = time.perf_counter()
    with native.kernel_threads_only() if device.type == "cpu" else nullcontext():
        outputs = run()
    seconds = time.perf_counter() - started
    return [replace(each, seconds=seconds) for each in outputs]
