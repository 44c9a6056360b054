"""Find a C compiler, and compile the kernels by it, each file on a processor of its own."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock, Timeout

from saltus.kernels.native.processor import allowed_processors
from saltus.storage.cache_files import disk_errors, is_own_file, new_file_with_digest
from saltus.storage.cache_folder import cache_folder

log = logging.getLogger("saltus")

NO_COMPILER = "no C compiler was found; install gcc or clang, or ziglang from PyPI"


def find_compilers() -> list[list[str]]:
    """The C compiler that CC names, with its arguments, if it is there; else all that are at hand.

    The Python package ziglang brings one (clang), for machines that have no other, or a Mac whose `cc` only asks to
    install one.
    """
    found = [
        [[path, *arguments] for name, *arguments in named if (path := shutil.which(name))]
        for named in (filter(None, [shlex.split(os.environ.get("CC", ""))]), [["cc"], ["gcc"], ["clang"]])
    ]
    packaged = [[sys.executable, "-m", "ziglang", "cc"]] if find_spec("ziglang") else []
    return found[0] or found[1] + packaged


def compile_library(commands: list[list[str]], sources: dict[str, bytes], target: Path) -> str | None:
    """Compile into place atomically by the first command that can; returns the first error, None on success."""
    errors: list[str] = []
    try:
        with disk_errors(cache_folder(), "them"), _exclusive_lock(target.with_suffix(".lock")):
            if is_own_file(target):  # made by another process meanwhile
                return None
            log.warning("compiling the kernels for this processor, once; it takes up to a minute")
            with new_file_with_digest(target) as made:
                for name, text in sources.items():
                    made.with_name(name).write_bytes(text)
                units = sorted((made.with_name(name) for name in sources if name.endswith(".c")), reverse=True)
                for command in commands:
                    if (error := _compile_units(command, units, made)) is None:
                        made.chmod(0o700)
                        return None
                    errors.append(error)
                raise OSError(errors[0])
    except (OSError, ValueError) as error:
        return str(error)
    return None


@contextmanager
def _exclusive_lock(file: Path) -> Iterator[None]:
    """Let one process at a time compile; the lock of a process that dies is released."""
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.warning("waiting while the kernels are compiled for this processor, once; it takes up to a minute")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _compile_units(command: list[str], units: list[Path], made: Path) -> str | None:
    """Compile each file on a processor of its own, and link them to a library; the error, if there is one."""
    objects = [unit.with_suffix(".o") for unit in units]
    commands = [[*command, "-c", unit, "-o", to] for unit, to in zip(units, objects, strict=True)]
    with ThreadPoolExecutor(allowed_processors()) as threads:
        errors = list(filter(None, threads.map(partial(_run_compiler, made.parent), commands)))
    return errors[0] if errors else _run_compiler(made.parent, [*command, "-shared", *objects, "-o", made, "-lm"])


def _run_compiler(folder: Path, command: list[str | Path]) -> str | None:
    """The error that says most, None on success; `folder`, which is removed, is for what the compiler leaves."""
    # gcc's and ziglang's; /tmp may be full
    own_folders = dict.fromkeys(("TMPDIR", "ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(folder))
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **own_folders})
    if not result.returncode:
        return None
    lines = result.stderr.strip().splitlines() or ["the compiler failed"]
    return next((line for line in lines if "error" in line), lines[0])
