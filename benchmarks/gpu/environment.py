"""Print what this machine has: packages, GPU, compilers, and which kernels of Saltus run on it.

What is missing or fails is printed as such and hinders nothing else: `python benchmarks/gpu/environment.py`. It exits
with 1 if there is no GPU or our kernels do not run on it.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

PACKAGES = (
    "numpy", "torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface_hub", "jaxtyping", "gguf",
    "typer", "rich", "pytest", "beartype", "fastapi", "uvicorn", "saltus",
)  # fmt: skip


def main() -> None:
    print(f"Python {platform.python_version()} ({sys.executable}), {platform.platform()}, {os.cpu_count()} cores")
    for program in ("gcc", "cc", "clang", "nvcc", "nvidia-smi"):
        print(f"{program}: {shutil.which(program) or 'missing'}")
    tried(_nvidia_smi)
    for name in PACKAGES:
        tried(lambda name=name: _version(name))
    found = [tried(each) for each in (_gpu, _kernels_for_gpus)]
    tried(_kernels_for_cpus)
    sys.exit(not all(found))


def tried(find: Callable[[], str]) -> bool:
    """Print what is found, or why it is not."""
    try:
        print(find(), flush=True)
    except Exception as error:  # whatever is missing, the rest is worth knowing
        print(f"FAILED {type(error).__name__}: {error}"[:500], flush=True)
        return False
    return True


def _nvidia_smi() -> str:
    return subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=20, check=True).stdout


def _version(name: str) -> str:
    started = time.perf_counter()
    try:
        version = getattr(importlib.import_module(name), "__version__", "no version")
    except Exception as error:
        return f"{name}: FAILED {type(error).__name__}: {error}"
    return f"{name}: {version}, imported in {time.perf_counter() - started:.1f} s"


def _gpu() -> str:
    import torch

    properties = torch.cuda.get_device_properties(0)
    free, whole = torch.cuda.mem_get_info()
    return (
        f"GPU: {properties.name}, compute capability {properties.major}.{properties.minor},"
        f" {properties.multi_processor_count} multiprocessors, {free / 1e9:.1f} of {whole / 1e9:.1f} GB are free,"
        f" {properties.shared_memory_per_block_optin:,} bytes of shared memory for a program, CUDA {torch.version.cuda}"
    )


def _kernels_for_gpus() -> str:
    import torch

    from saltus.models.cuda.launching import check_launch

    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU for our kernels")
    started = time.perf_counter()
    check_launch(torch.device("cuda", 0))
    return f"kernels for GPUs: run, the first one after {time.perf_counter() - started:.1f} s"


def _kernels_for_cpus() -> str:
    from saltus.kernels import native

    started = time.perf_counter()
    loaded = native.load_kernels() is not None
    return f"kernels for CPUs: {'run' if loaded else 'missing'}, after {time.perf_counter() - started:.1f} s"


if __name__ == "__main__":
    main()
