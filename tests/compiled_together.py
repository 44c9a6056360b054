"""Compile products and picks of some rows together for a GPU that is not there, and print what was compiled."""

import threading
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from saltus.models.cuda import linear_kernels, pick_kernels
from saltus.models.cuda.launching import compile_together

launchers: list[str] = []


def launcher(source: Any, metadata: Any) -> Any:
    """What launches a compiled kernel; Triton makes one at the first launch, if none is there."""
    launchers.append(f"{metadata.name} {'beside others' if threading.current_thread() is not main else 'alone'}")
    return lambda *args: None


def multiply_and_pick() -> None:
    """For 1 row and for 32, whose numbers lie at other multiples of 8 bytes."""
    keys, temperatures = torch.zeros(33, 2, dtype=torch.int64), torch.zeros(33, dtype=torch.float64)
    for rows in (1, 1, 32, 32):
        logits = linear_kernels.product(torch.zeros(rows, 64), torch.zeros(64, 64), rows)
        pick_kernels.find_tokens(logits, keys[-rows:], temperatures[-rows:])


main = threading.main_thread()
gpu = {"get_current_target": lambda: GPUTarget("cuda", 90, 32), "get_current_device": lambda: 0,
       "get_current_stream": lambda device: 0, "launcher_cls": launcher}  # fmt: skip
driver.set_active(SimpleNamespace(**gpu))
compile_together(multiply_and_pick)
assert linear_kernels._linear.function.device_caches[0][0], "compiled kernels are kept"
try:
    compile_together(lambda: 1 // 0)
except ZeroDivisionError:
    print(*sorted(launchers), sep="\n")
try:
    multiply_and_pick()
except AttributeError as error:  # it is launched, for which the device must be there
    print(error)
