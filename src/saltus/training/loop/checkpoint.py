"""Keep a run's state on disk so that no moment of dying can damage it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from filelock import FileLock, Timeout


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Written under another name, brought to the disk, then renamed: the file is always the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Put a run's state there."""
    write_atomically(path, lambda file: torch.save(state, file))


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """The state, or None where none was saved. Errors: a file that is damaged."""
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
    """Work in a folder that no other process works in meanwhile. Errors: ValueError where one does."""
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
