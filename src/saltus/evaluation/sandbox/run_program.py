"""Run programs that a language model wrote, each in a confined process, and report whether they ended without error.

See confined_process.py for the guards. On Linux (x86-64, aarch64) a program can neither write, nor start processes, nor
reach other processes or the network. On other systems a hook in Python stops accidents, but not a malicious program.
Programs may read files. Why our own: HumanEval's checks disable functions in Python only, and containers, bubblewrap or
nsjail need privileges or packages that a user's machine may lack.
"""

from __future__ import annotations

import importlib.util
import math
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LAUNCHER = Path(__file__).with_name("confined_process.py")
START_TIMEOUT = 60.0  # seconds that Python itself may take to start, on a machine busy with other things
MAX_THREADS = 256
MAX_REPORT_BYTES = 4096  # bytes read of a report at most


@dataclass(frozen=True)
class ProgramResult:
    """Whether a program ran to its end without an exception, and "passed" or the reason in a few words."""

    passed: bool
    reason: str


def run_program(program: str, *, seconds: float | int = 10, memory_mb: int = 1024) -> ProgramResult:
    """Run a Python program for at most `seconds` of wall time within `memory_mb` MB of address space.

    It sees the standard library and numpy, an empty folder, no input; what it prints is thrown away, and `__name__` is
    not "__main__". ValueError on Windows, and where Python itself does not start within the memory.
    """
    return run_with_guards(program, seconds, memory_mb, "filter+hook")


def run_with_guards(program: str, seconds: float | int, memory_mb: int, guards: str) -> ProgramResult:
    """`run_program` with the named guards only, so that tests can check each one."""
    if os.name != "posix":
        raise ValueError("programs can only be confined on Linux and macOS; run them there, or in WSL")
    token = secrets.token_hex(16).encode()
    reading, writing = os.pipe()
    try:
        with tempfile.TemporaryDirectory(prefix="saltus-") as folder:
            try:
                process = _start(folder, writing, seconds, memory_mb, guards)
            finally:
                os.close(writing)
            try:
                _send_program(process, token + b"\n" + program.encode("utf-8", "surrogatepass"))
                report, stopped = _wait(process.pid, reading, token, seconds)
            finally:
                _kill(process)
    finally:
        os.close(reading)
    if not report.startswith(b"!") and stopped is None:
        raise ValueError(f"Python did not start within {memory_mb:,} MB; give programs more memory")
    return _parse_result(report[1:], token, stopped, process.returncode, seconds)


def _start(folder: str, report_fd: int, seconds: float | int, memory_mb: int, guards: str) -> subprocess.Popen[bytes]:
    numpy = importlib.util.find_spec("numpy")
    place = str(Path(numpy.origin).parent.parent) if numpy and numpy.origin else ""
    isolated = ["-P", "-s", "-S", "-B"]  # -I less -E: the environment is ours, and fixes the order of sets
    words = [report_fd, os.getpid(), math.ceil(seconds), memory_mb, guards, place]
    return subprocess.Popen(
        [sys.executable, *isolated, "-X", "utf8", str(LAUNCHER), *map(str, words)],
        cwd=folder,
        env={"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "LANG": "C.UTF-8"},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # output is discarded
        stderr=subprocess.DEVNULL,
        pass_fds=(report_fd,),
        start_new_session=True,
    )


def _send_program(process: subprocess.Popen[bytes], payload: bytes) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(payload)
    with suppress(BrokenPipeError):
        process.stdin.close()


def _wait(pid: int, report_fd: int, token: bytes, seconds: float | int) -> tuple[bytes, str | None]:
    """What the process reports until it ends, and the reason if it had to be stopped."""
    report, deadline = b"", time.monotonic() + START_TIMEOUT
    with selectors.DefaultSelector() as selector:
        selector.register(report_fd, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if selector.select(min(left, 0.05)):
                part = os.read(report_fd, MAX_REPORT_BYTES)
                if not report and part:
                    deadline = time.monotonic() + seconds
                report += part
                if not part or len(report) > 1 or len(report) > MAX_REPORT_BYTES:
                    return report, None
            elif _num_threads(pid) > MAX_THREADS:
                return report, f"started more than {MAX_THREADS} threads"
    return report, f"took more than {seconds:g} s"


def _num_threads(pid: int) -> int:
    """The number of threads of a process; 0 if the system does not tell cheaply."""
    try:
        return os.stat(f"/proc/{pid}/task").st_nlink - 2
    except OSError:
        return 0


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its group; the group id cannot be reused before the process is waited for."""
    with suppress(ProcessLookupError, PermissionError):  # macOS: not permitted if the process has ended
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(OSError):
        process.kill()
    process.wait()


def _parse_result(
    report: bytes, token: bytes, stop_reason: str | None, exit_status: int, seconds: float | int
) -> ProgramResult:
    if stop_reason:
        return ProgramResult(False, stop_reason)
    if report == token + b"+":
        return ProgramResult(True, "passed")
    if report.startswith((b"-", token + b"-")):
        return ProgramResult(False, report.removeprefix(token)[1:].decode("utf-8", "replace"))
    if exit_status == -signal.SIGXCPU:
        return ProgramResult(False, f"took more than {seconds:g} s")
    if exit_status == -signal.SIGSYS:
        return ProgramResult(False, "made a forbidden system call")
    if exit_status < 0 and exit_status != -signal.SIGKILL:  # SIGKILL is ours: the program closed its report and went on
        return ProgramResult(False, f"ended by {signal.Signals(-exit_status).name}")
    return ProgramResult(False, "left early")
