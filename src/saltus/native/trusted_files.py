"""Keep files of code so that nobody else can plant one, and notice those that a full disk or a crash damaged."""

from __future__ import annotations

import os
import stat
from hashlib import blake2b
from pathlib import Path

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_private_folder(folder: Path) -> str | None:
    """Make a folder that only its owner can write to; a message where it belongs to somebody else."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid not in _trusted_owners():
            return f"{folder} belongs to another user; set SALTUS_CACHE to a folder of your own"
        if found.st_mode & WRITABLE_BY_OTHERS:
            folder.chmod(0o700)
    except OSError as error:
        return str(error)


def keep_file(made: Path, target: Path) -> None:
    """Move a finished file into place with a digest of it, so that a damaged one is noticed. Errors: OSError."""
    content = made.read_bytes()
    made.chmod(0o700)
    digest = made.with_suffix(".digest")
    digest.write_text(_digest(content))
    for file in (made, digest):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    os.replace(digest, _digest_file(target))
    os.replace(made, target)


def is_own_file(file: Path) -> bool:
    """True for a whole file that `keep_file` wrote for this user, and that nobody else can change."""
    try:
        found = file.lstat()
        return (
            stat.S_ISREG(found.st_mode)
            and found.st_uid in _trusted_owners()
            and not found.st_mode & WRITABLE_BY_OTHERS
            and _digest_file(file).read_text() == _digest(file.read_bytes())
        )
    except (OSError, ValueError):
        return False


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()


def _digest_file(file: Path) -> Path:
    return file.with_suffix(".digest")


def _trusted_owners() -> set[int]:
    """This user and the administrator; systems without owners have one that fits all."""
    return {0, getattr(os, "getuid", lambda: 0)()}
