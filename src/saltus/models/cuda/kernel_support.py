"""Say whether our kernels for GPUs run on this machine."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
from functools import lru_cache

import torch

log = logging.getLogger("saltus")


class KernelsFail(ValueError):
    """A kernel of ours does not compile for the GPU, or needs more of it than there is."""

    def __init__(self, name: str, error: Exception) -> None:
        self.reason = f"{name}: {_reason(error)}"
        super().__init__(
            f"our kernels for GPUs do not run here ({self.reason}); set SALTUS_KERNELS=off to do without them"
        )


def has_kernels(device: str | torch.device) -> bool:
    """True where our kernels run on this GPU, unless SALTUS_KERNELS says that they are off, or `give_up` has."""
    if os.environ.get("SALTUS_KERNELS") == "off" or _given_up:
        return False
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:  # a GPU is tried once, and not while a graph is captured
        device = torch.device("cuda", torch.cuda.current_device())
    return _kernels_run(device)


def give_up(failure: KernelsFail) -> None:
    """Do without our kernels in this process from now on, and say so."""
    _warn_that_they_are_off(failure.reason)
    _given_up.append(failure)


_given_up: list[KernelsFail] = []


@lru_cache
def _kernels_run(device: torch.device) -> bool:
    """True if Triton is there and compiles for the GPU, for which it needs a C compiler; a warning says what fails."""
    if importlib.util.find_spec("triton") is None:
        if device.type == "cuda":
            _warn_that_they_are_off("Triton is missing; pip install triton")
        return False
    try:
        from saltus.models.cuda.launching import check_launch

        check_launch(device)
    except Exception as error:  # of many kinds, by what is missing
        _warn_that_they_are_off(_reason(error))
        return False
    return True


def _warn_that_they_are_off(reason: str) -> None:
    log.warning("our kernels for GPUs are off, since they do not run here: %s", reason)


def _reason(error: Exception) -> str:
    """A line of it, with the cure of what Triton often lacks.

    Triton's errors of compilation show the kernel's source before what they have to say.
    """
    if isinstance(error, subprocess.CalledProcessError):  # it names the whole command; the compiler has said why
        return "Triton's C compiler fails, as it does without Python's headers; install python3-dev (python3-devel)"
    if "find C compiler" in str(error):
        return "Triton finds no C compiler; install gcc or clang"
    said = getattr(error, "error_message", None) or str(error)
    return (said.strip() or type(error).__name__).splitlines()[0]
