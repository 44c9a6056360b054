"""Declare kernels of which there is one binary for calls of all sizes, and compile several at once."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import triton
import triton.errors
import triton.language as tl

from saltus.models.cuda.kernel_support import KernelsFail

MIN_CAPABILITY = 8, 0  # of GPUs that multiply bfloat16; for others Triton makes products number by number
LARGEST_SHARED_MEMORY = 232_448  # bytes of a program, of the GPUs that have most (compute capability 9.0 and 10.0)
FUSION = {"enable_fp_fusion": True}  # of products and sums: part of our rounding, while Triton's default will change
FAILED_PASS = "PassManager::run failed"  # what Triton's compiler says by a RuntimeError
_only_compiles: ContextVar[bool] = ContextVar("_only_compiles", default=False)


def power_of_two(count: int) -> int:
    """The next power of two, as sizes of tiles must be."""
    return 1 << (count - 1).bit_length()


def largest_power_of_two(size: int) -> int:
    """The largest power of two that divides it."""
    return size & -size


@dataclass(frozen=True)
class Kernel:
    """A kernel: kernel[grid](…) launches it, and within `compile_together` compiles it for such arguments."""

    function: Any  # of Triton

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        launch = partial(self.function.warmup, grid=grid) if _only_compiles.get() else partial(self._launch, grid)
        return partial(launch, **FUSION)

    def _launch(self, grid: Any, *args: Any, **named: Any) -> None:
        """Errors: KernelsFail where Triton or the GPU refuses it; what a kernel needs depends on a model's sizes."""
        try:
            self.function[grid](*args, **named)
        except (triton.errors.TritonError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and FAILED_PASS not in str(error):
                raise
            raise KernelsFail(self.function.__name__, error) from error


def kernel(*shared: str, anywhere: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Kernel]:
    """A kernel with one binary for all values of the arguments named here, so that none of them changes its rounding.

    Those of `anywhere` are pointers, which are at multiples of 16 bytes in some calls only. Import hooks that check
    types wrap functions; Triton needs the one that was written.
    """
    make: Any = triton.jit(do_not_specialize=list(shared), do_not_specialize_on_alignment=list(anywhere))
    return lambda function: Kernel(make(inspect.unwrap(function)))


def compile_together(run: Callable[[], object]) -> None:
    """Compile the kernels that `run` launches, on all cores; none of them runs.

    Compiled one after another, as they are launched, they take half a second each. What does not compile says so when
    it is launched.
    """
    copy_context().run(_compile_together, run)  # whatever interrupts it, later launches are launches again


def _compile_together(run: Callable[[], object]) -> None:
    _only_compiles.set(True)
    with _Compilers(os.cpu_count()) as compilers, triton.AsyncCompileMode(compilers, ignore_errors=True):
        run()


class _Compilers(ThreadPoolExecutor):
    """Threads that compile kernels, and what launches them."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(_with_launcher, partial(fn, *args, **kwargs))


def _with_launcher(compile_kernel: Callable[[], Any]) -> Any:
    compiled, driver = compile_kernel(), triton.runtime.driver.active
    driver.launcher_cls(compiled.src, compiled.metadata)  # pyright: ignore  # Triton 3.6 compiles C, and keeps it
    return compiled


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """What kernels are launched in, unless a caller has chosen the device: Triton launches on the thread's own GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def device_function(function: Callable[..., Any]) -> Any:
    """A function for kernels to call; see `kernel`."""
    return triton.jit(inspect.unwrap(function))


@device_function
def rounded_product(x, y):
    """x · y, rounded by itself, in float32.

    A product that is added to something is fused with the sum otherwise. Where it is rounded to 16 bits before that,
    LLVM multiplies and adds numbers of 16 bits, and fuses these. Where it is summed over, each lane of a warp fuses its
    own product with the rounded one of another lane, so that lanes have different sums.
    """
    return tl.fma(x, y, 0.0)


@lru_cache
def pipeline_bytes(device: torch.device) -> int:
    """Bytes of shared memory for the pipeline of a program: seven eighths of what a program may have."""
    whole = LARGEST_SHARED_MEMORY
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return whole * 7 // 8


@kernel()
def _write_one(out):
    tl.store(out, 1.0)


def check_launch(device: torch.device) -> None:
    """Compile and run a kernel on the device, if it is a GPU.

    Errors: RuntimeError for a GPU of less than MIN_CAPABILITY; those of Triton, which needs a C compiler.
    """
    if device.type == "cuda":
        if (capability := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
            needed, found = (f"{major}.{minor}" for major, minor in (MIN_CAPABILITY, capability))
            raise RuntimeError(f"they need a GPU of compute capability {needed} or more, and this one has {found}")
        out = torch.zeros(1, device=device)
        with launching_on(device):
            _write_one[(1,)](out)
        if out.item() != 1:
            raise RuntimeError("a kernel wrote something else than it should")
