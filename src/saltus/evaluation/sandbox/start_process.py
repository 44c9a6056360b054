"""Start a confined process (confined_process.py), in bubblewrap where that works, and read its report."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

LAUNCHER = Path(__file__).with_name("confined_process.py")
MAX_REPORT_BYTES = 4096  # bytes read of a report at most
ENVIRONMENT = {  # all of it: no token or key of the user's environment reaches a program; it fixes the order of sets
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "LANG": "C.UTF-8",
}
SYSTEM_PATHS = ["/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives"]
SYSTEM_FILES = ["/proc/cpuinfo", "/proc/meminfo"]


class ConfinedProcess:
    """A confined process and what it has reported; a context manager that kills it."""

    def __init__(self, process: subprocess.Popen[bytes], report_fd: int, wrapped: bool) -> None:
        self.process, self.report_fd, self.wrapped = process, report_fd, wrapped
        self.report, self.closed = b"", False

    def __enter__(self) -> ConfinedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        os.close(self.report_fd)

    def send(self, payload: bytes) -> None:
        """Send the program, all at once."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(payload)
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def read_report(self) -> None:
        """Read what is there; the report is closed at its end, or when it is too long."""
        part = os.read(self.report_fd, MAX_REPORT_BYTES)
        self.report += part
        self.closed = not part

    def has_decided(self) -> bool:
        """True if the process has reported more than that it is ready, or has closed its report."""
        return self.closed or len(self.report) > 1

    def num_threads(self) -> int:
        """The number of its threads; 0 if the system does not tell cheaply."""
        return _num_threads(self.process.pid)

    def kill(self) -> int:
        """Kill the process and its group, and return its exit status; a group's id is not reused before that."""
        if self.wrapped and self.closed:  # bubblewrap ends shortly after its program, with its exit status
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
        with suppress(ProcessLookupError, PermissionError):  # macOS: not permitted if the process has ended
            if self.process.returncode is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(OSError):
            self.process.kill()
        status = self.process.wait()
        return 128 - status if self.wrapped and status > 128 else status


def start(folder: str, role: str, channel: int, seconds: float | int, memory_mb: int, guards: str) -> ConfinedProcess:
    """Start a process that waits for its program; `channel` is its socket to the other process of a test."""
    numpy = importlib.util.find_spec("numpy")
    place = str(Path(numpy.origin).parent.parent) if numpy and numpy.origin else ""
    isolated = ["-P", "-s", "-S", "-B"]  # -I less -E: the environment is ours
    prefix = bubblewrap_command(place) if "bubblewrap" in guards else ()
    guards = guards if prefix else guards.replace("bubblewrap", "")
    report_fd, writing = os.pipe()
    words = [writing, os.getpid(), math.ceil(seconds), memory_mb, channel, role, guards, place]
    inside = ["--dir", folder, "--chdir", folder, "--remount-ro", "/", "--"] if prefix else []
    try:
        process = subprocess.Popen(
            [*prefix, *inside, sys.executable, *isolated, "-X", "utf8", str(LAUNCHER), *map(str, words)],
            cwd=folder,
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # output is discarded
            stderr=subprocess.DEVNULL,
            pass_fds=(writing, channel),
            start_new_session=True,
        )
    except BaseException:
        os.close(report_fd)
        raise
    finally:
        os.close(writing)
    return ConfinedProcess(process, report_fd, bool(prefix))


@lru_cache(maxsize=1)
def bubblewrap_command(place: str) -> tuple[str, ...]:
    """bubblewrap's command line, which shows a process only what Python needs; () where there is none that works."""
    program = shutil.which("bwrap")
    if program is None or not sys.platform.startswith("linux"):
        return ()
    folders = [*SYSTEM_PATHS, sys.base_prefix, sys.prefix, sys.exec_prefix, str(LAUNCHER.parent), place]
    shown = [path for path in dict.fromkeys(folders) if path and os.path.exists(path)]
    files = [path for path in SYSTEM_FILES if os.path.exists(path)]
    command = [program, "--unshare-all", "--die-with-parent", "--dev", "/dev"]
    command += [word for path in (*shown, *files) for word in ("--ro-bind", path, path)]
    check = [sys.executable, "-S", "-c", "import ctypes, json, socket"]
    works = subprocess.run([*command, "--", *check], env=ENVIRONMENT, capture_output=True, timeout=60).returncode == 0
    return tuple(command) if works else ()


def _num_threads(pid: int) -> int:
    """The threads of a process and, for bubblewrap, of its children."""
    threads = 0
    with suppress(OSError):
        threads = os.stat(f"/proc/{pid}/task").st_nlink - 2
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            threads += sum(_num_threads(int(child)) for child in file.read().split())
    return threads
