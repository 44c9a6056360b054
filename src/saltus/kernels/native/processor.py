"""What the processor can do, and what the compiler is told about it; SALTUS_ISA chooses less."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
import subprocess
from functools import lru_cache
from pathlib import Path

IS_ARM = platform.machine().lower() in ("aarch64", "arm64")
NATIVE = "-mcpu=native" if IS_ARM else "-march=native"  # the latter is an error for Apple's processors
COMPILER_FLAGS = [
    "-O3",
    NATIVE,
    "-ffp-contract=off",  # what is fused is written as fused: no compiler decides the bits
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-pthread",
]
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
INSTRUCTION_SETS = {  # by SALTUS_ISA: what the compiler is told, and what the processor must have
    "generic": (["-march=x86-64"], "sse2"),
    "sse4": (["-march=x86-64-v2"], "sse4_2"),
    "avx2": (["-march=x86-64-v3"], "avx2"),
    "avx-vnni": (["-march=x86-64-v3", "-mavxvnni"], "avx_vnni"),
    "avx512": (["-march=x86-64-v4"], "avx512bw"),
    "avx512-vnni": (["-march=x86-64-v4", "-mavx512vnni"], "avx512_vnni"),
    "avx512-bf16": (["-march=cooperlake"], "avx512_bf16"),
    "amx": (["-march=sapphirerapids"], "amx_bf16"),
}


def compiler_flags(features: str) -> list[str]:
    """Those of the processor's own instruction set, or of the one that SALTUS_ISA names."""
    if not (chosen := os.environ.get("SALTUS_ISA")):
        return COMPILER_FLAGS
    if chosen not in INSTRUCTION_SETS:
        raise ValueError(f"SALTUS_ISA is {chosen}, but can be {', '.join(INSTRUCTION_SETS)}, or unset")
    named, needed = INSTRUCTION_SETS[chosen]
    if needed not in features.split():
        raise ValueError(f"SALTUS_ISA is {chosen}, but this processor lacks {needed}; choose another or unset it")
    return [flag for flag in COMPILER_FLAGS if flag != NATIVE] + named


def lesser_flags(features: str) -> list[list[str]]:
    """Those of the instruction sets that a compiler which does not know this processor may know."""
    if os.environ.get("SALTUS_ISA"):
        return []
    common = [flag for flag in COMPILER_FLAGS if flag != NATIVE]
    if IS_ARM:  # without a flag a compiler on a Mac compiles for the first of Apple's processors
        has_dot_products = "asimddp" in features.split()
        return [[*common, "-march=armv8.2-a+dotprod"], common] if has_dot_products else [common]
    known = [INSTRUCTION_SETS[name] for name in ("avx512", "avx2", "sse4", "generic")]
    return [[*common, *named] for named, needed in known if needed in features.split()]


@lru_cache(maxsize=1)
def allowed_processors() -> int:
    """How many processors' time this process may take: those that it may run on (taskset), and what its container
    grants of them (cgroup).

    A thread for each of a host's processors would wait for its turn most of the time.
    """
    folders, own = [CGROUPS], ""
    with contextlib.suppress(OSError):
        own = OWN_CGROUPS.read_text()
    for path in (line.removeprefix("0::/") for line in own.splitlines() if line.startswith("0::/")):
        folders += [CGROUPS / folder for folder in (Path(path), *Path(path).parents)]
    own_processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    granted = [float(own_processors or 1)]
    for folder in folders:
        with contextlib.suppress(OSError, ValueError):
            granted.append(_quota(*(folder / "cpu.max").read_text().split()))
    with contextlib.suppress(OSError, ValueError):  # the first version of cgroups
        names = "cpu.cfs_quota_us", "cpu.cfs_period_us"
        granted.append(_quota(*((CGROUPS / "cpu" / name).read_text() for name in names)))
    return max(1, math.ceil(min(granted)))


def _quota(quota: str, period: str) -> float:
    """Processors, of microseconds in each period."""
    return math.inf if quota.strip() in ("max", "-1") else float(quota) / float(period)


def request_amx(features: str) -> bool:
    """Ask Linux to let this process use the matrix unit (AMX), as each must before its first tile; True if it may."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    if (
        "amx_bf16" not in features
        or os.environ.get("SALTUS_AMX", "1") == "0"
        or os.environ.get("SALTUS_ISA", "amx") != "amx"
    ):
        return False
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


PROCESSOR_FIELDS = "vendor_id", "flags", "CPU implementer", "CPU part", "Features"  # of x86; of Arm
APPLE_FIELDS = "machdep.cpu.brand_string", "machdep.cpu.features", "machdep.cpu.leaf7_features"  # the latter two of x86


def processor_features() -> str:
    """The processor's maker and instructions, on which the compiled code depends: unlike machines may share a cache."""
    try:
        with open("/proc/cpuinfo") as info:
            fields = dict(line.split(":", 1) for line in info if line.startswith(PROCESSOR_FIELDS))
            return " ".join(fields.values()) or platform.processor()
    except OSError:
        return f"{platform.platform()} {platform.processor()} {_ask_apple(*APPLE_FIELDS).lower().replace('.', '_')}"


def processor_name() -> str:
    """The name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = [f"model name: {_ask_apple(APPLE_FIELDS[0])}"]
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _ask_apple(*names: str) -> str:
    """What a Mac says of its processor; nothing of names that it does not know, and elsewhere."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(["sysctl", "-n", *names], capture_output=True, text=True, timeout=10).stdout.strip()
    return ""
