"""Keep files of code so that nobody else can plant one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from saltus.storage.cache_files import has_digest

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_private_folder(folder: Path) -> str | None:
    """Make a folder that only its owner can write to; a message where it belongs to somebody else."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        state = folder.stat()
        if state.st_uid not in _trusted_owners():
            return f"{folder} belongs to another user; set SALTUS_CACHE to a folder of your own"
        if state.st_mode & WRITABLE_BY_OTHERS:
            folder.chmod(0o700)
    except OSError as error:
        return str(error)


def is_own_file(file: Path) -> bool:
    """True for a whole file that `new_file_with_digest` wrote for this user, and that nobody else can change."""
    try:
        state = file.lstat()
    except OSError:
        return False
    return (
        stat.S_ISREG(state.st_mode)
        and state.st_uid in _trusted_owners()
        and not state.st_mode & WRITABLE_BY_OTHERS
        and has_digest(file)
    )


def _trusted_owners() -> set[int]:
    """This user and the administrator; systems without owners have one that fits all."""
    return {0, getattr(os, "getuid", lambda: 0)()}
