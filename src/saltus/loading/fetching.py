"""Make folders of the cache: one process at a time, and never an incomplete folder that looks like a complete one."""

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from rich.filesize import decimal

from saltus.loading.progress import ProgressCallback, Stage
from saltus.storage.cache_files import TEMPORARY, disk_errors, remove_leftovers, sync
from saltus.storage.cache_folder import cache_folder


class SourceError(ValueError):
    """A model cannot be found or downloaded; the message is one line that says why and what to do."""


@contextmanager
def exclusive_lock(name: str, progress: ProgressCallback) -> Iterator[None]:
    """Let one process at a time make the model of this name; the lock of a process that dies is released."""
    file = cache_folder() / "locks" / f"{name}.lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(Stage(f"waiting for another process that fetches {name}"))
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Make a folder under another name and rename it when it is complete. The caller holds `exclusive_lock`.

    Remains of earlier runs and of a failure are removed.
    """
    making = folder.with_name(f"{TEMPORARY}{folder.name}")
    remove_leftovers(folder.parent)
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    try:
        yield making
        for file in making.iterdir():
            sync(file)
        if folder.exists():  # a damaged one: os.replace takes no folder that holds files
            damaged = folder.with_name(f"{TEMPORARY}{folder.name}.damaged")
            shutil.rmtree(damaged, ignore_errors=True)
            folder.rename(damaged)
            shutil.rmtree(damaged, ignore_errors=True)
        making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def require_disk_space(folder: Path, needed: int, name: str, env_variable: str) -> None:
    """Raise SourceError unless the disk of the folder, which `env_variable` can move, has `needed` bytes free."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise SourceError(
            f"{name} needs {decimal(needed)} while it is made and the disk of {folder} has {decimal(free)} free;"
            f" free some, or name a folder on another disk with {env_variable}"
        )


def as_source_errors(folder: Path, name: str, env_variable: str) -> AbstractContextManager[None]:
    """Turn errors of a full or read-only disk into a SourceError with the cure."""
    return disk_errors(folder, name, env_variable, SourceError)


def first_line(error: BaseException | str) -> str:
    """The first line of an error's message without its full stop, at most 200 characters; else the error's class.

    A line that ends in a colon is shown with the next one.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = " ".join(lines[: 1 + lines[0].endswith(":")]) if lines else type(error).__name__
    return message[:200].rstrip(" .:")
