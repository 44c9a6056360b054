"""Run a draft network's pass with kernel threads alone, and note how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from saltus.core.forward import ForwardOutputs
from saltus.kernels import native


def running_on(device: torch.device) -> AbstractContextManager[Any]:
    """What a draft network runs in: kernel threads alone on the CPU, and the GPU that Triton is to launch on."""
    return native.kernel_threads_only() if device.type == "cpu" else torch.cuda.device(device)


def timed_outputs(run: Callable[[], Sequence[ForwardOutputs]], device: torch.device) -> list[ForwardOutputs]:
    """The outputs of a pass on this device, each with the seconds of the whole pass."""
    started = time.perf_counter()
    with running_on(device):
        outputs = run()
    seconds = time.perf_counter() - started
    return [replace(each, seconds=seconds) for each in outputs]
