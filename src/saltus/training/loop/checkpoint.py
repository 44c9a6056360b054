"""Files that an interruption at any moment cannot damage: atomic writes, checkpoints, locked folders."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from filelock import FileLock, Timeout

from saltus.storage.cache_files import full_disk_errors


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write under another name, sync to disk, then rename: the file is always the old one or the new one.

    Errors: OSError, which names the file where the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.new")
    try:
        with full_disk_errors(path), temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    temporary.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object of JSON, atomically."""
    write_atomically(path, lambda file: file.write((json.dumps(content, indent=1) + "\n").encode()))


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a run's state, atomically."""
    write_atomically(path, lambda file: torch.save(state, file))


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """The state, or None where none was saved. Errors: ValueError for a damaged file."""
    if not path.exists():
        return None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"the checkpoint {path} cannot be read ({type(error).__name__}); delete it to begin anew"
        ) from error


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """While open, no other process can lock the folder. Errors: ValueError if one holds the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"another process is at work in {folder}; wait for it, or take another folder") from None
    try:
        yield
    finally:
        lock.release()
