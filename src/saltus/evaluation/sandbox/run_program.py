"""Run programs that a language model wrote, each in a confined process, and report whether they pass their tests.

See confined_process.py for the guards. On Linux (x86-64, aarch64) a program can neither write, nor start processes, nor
reach other processes or the network. On other systems a hook in Python stops accidents, but not a malicious program.
Programs may read files; where bubblewrap works, only those that Python needs. Why our own: HumanEval's checks disable
functions in Python only, and containers, bubblewrap or nsjail need privileges or packages that a user's machine may
lack.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from saltus.evaluation.sandbox.start_process import ConfinedProcess, start

START_TIMEOUT = 60.0  # seconds that Python itself may take to start, on a machine busy with other things
MAX_THREADS = 256
PROGRAM_LOST = b"!?"  # the report of tests whose program has ended
DEFAULT_GUARDS = "filter+hook+bubblewrap"


@dataclass(frozen=True)
class ProgramResult:
    """Whether a program ran to its end without an exception, and "passed" or the reason in a few words."""

    passed: bool
    reason: str


@dataclass(frozen=True)
class GradedProgram:
    """A program, and tests of what it defines: `functions` and `modules` (by name) are what its task asks it to define.

    Builtins that the tests use are Python's own but for `functions`, and `modules` are Python's own, too, so that a
    program cannot pass by other definitions of `abs` or `math`.
    """

    program: str
    tests: str
    functions: tuple[str, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)


def run_tests(
    tested: GradedProgram, *, seconds: float | int = 10, memory_mb: int = 1024, guards: str = DEFAULT_GUARDS
) -> ProgramResult:
    """Run a Python program, and its tests in a second process, each within `memory_mb` MB of address space.

    They have `seconds` of wall time, and see the standard library and numpy, an empty folder, no input; what they print
    is thrown away, and `__name__` is not "__main__".
    The tests call the program's functions over a socket, with copies of the arguments, and compare copies of the
    results. So a program can neither report that it passed, nor change what tests call, nor return what equals all.
    ValueError on Windows, and where Python itself does not start within the memory. Only checks name other `guards`.
    """
    if os.name != "posix":
        raise ValueError("programs can only be confined on Linux and macOS; run them there, or in WSL")
    token = secrets.token_hex(16).encode()
    task = {"tests": tested.tests, "functions": tested.functions, "modules": dict(tested.modules)}
    sources = {"tests": json.dumps(task), "tested": tested.program}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="saltus-"))
        processes = []
        ends = [stack.enter_context(end) for end in socket.socketpair()]
        for (role, source), end in zip(sources.items(), ends, strict=True):
            process = start(folder, role, end.fileno(), seconds, memory_mb, guards)
            processes.append(stack.enter_context(process))
            secret = b"" if role == "tested" else token  # with the token a process says that the program passed
            process.send(secret + b"\n" + source.encode("utf-8", "surrogatepass"))
        for end in ends:  # each process notices when the other ends
            end.close()
        stop_reason = _wait(processes, seconds)
        decisive = _decisive(processes)
        exit_status = decisive.kill()
    if not decisive.report.startswith(b"!") and stop_reason is None:
        raise ValueError(f"Python did not start within {memory_mb:,} MB; give programs more memory")
    return _parse_result(decisive.report[1:], token, stop_reason, exit_status, seconds)


def _wait(processes: list[ConfinedProcess], seconds: float | int) -> str | None:
    """Wait until a process has reported its end, and read what others did; a reason if they had to be stopped."""
    started, deadline = False, time.monotonic() + START_TIMEOUT
    with selectors.DefaultSelector() as selector:
        for process in processes:
            selector.register(process.report_fd, selectors.EVENT_READ, process)
        while (left := deadline - time.monotonic()) > 0:
            ready = selector.select(min(left, 0.05))
            for key, _ in ready:
                key.data.read_report()
            if any(process.has_decided() for process in processes):
                for key, _ in selector.select(0):
                    key.data.read_report()
                return None
            if not started and all(process.report for process in processes):
                started, deadline = True, time.monotonic() + seconds
            if not ready and sum(process.num_threads() for process in processes) > MAX_THREADS:
                return f"started more than {MAX_THREADS} threads"
    return f"took more than {seconds:g} s"


def _decisive(processes: list[ConfinedProcess]) -> ConfinedProcess:
    """The process that decides: the first, unless it only reports that the other has ended, or reports nothing."""
    first, last = processes[0], processes[-1]
    return first if first.has_decided() and first.report != PROGRAM_LOST else last


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
