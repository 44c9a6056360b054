"""Write files of the cache whole or not at all, notice by their digests those that something damaged, and keep files of
code so that nobody else can plant one."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

log = logging.getLogger("saltus")

TEMPORARY = ".new-"  # how names of files and folders begin that are not finished
LEFT_AFTER = 3600.0  # seconds without a change, after which what is not finished was left by a process that died
ALWAYS_READ = 16 << 20  # bytes: the digest of a smaller file is computed at each check
READ_AGAIN_AFTER = 7 * 86400.0  # seconds: that of a larger one, too, if the last time is longer ago
SETTLED_AFTER = 2.0  # seconds without a change, after which another change is sure to leave another time
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
CLOSED_FOLDER = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENOENT,
    errno.ELOOP,
)
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class DamagedFile(ValueError):
    """A file is not as it was written."""


@contextmanager
def disk_errors(
    folder: Path, name: str, env_variable: str = "SALTUS_CACHE", kind: type[ValueError] = ValueError
) -> Iterator[None]:
    """Turn errors of a full or read-only disk into a ValueError with the cure, also those of libraries in Rust."""
    try:
        yield
    except Exception as error:
        number, reason = _disk_error(error)
        if number in FULL_DISK:
            raise kind(
                f"the disk of {folder} ran full while writing {name}; free some space,"
                f" or name a folder on another disk with {env_variable}"
            ) from error
        if number in CLOSED_FOLDER:
            raise kind(
                f"{name} cannot be kept in {folder} ({reason});"
                f" make that folder writable, or name another with {env_variable}"
            ) from error
        raise


@contextmanager
def full_disk_errors(path: Path) -> Iterator[None]:
    """Turn an error that says or hides that a disk is full into an OSError with a path: PyTorch's hides it."""
    try:
        yield
    except Exception as error:
        chain: BaseException | None = error
        while chain is not None and _disk_error(chain)[0] not in FULL_DISK:
            chain = chain.__cause__ or chain.__context__
        if chain is None:
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error


def _disk_error(error: BaseException) -> tuple[int | None, str]:
    """The number and the text of an error of the operating system."""
    if isinstance(error, OSError):
        return error.errno, error.strerror or str(error)
    match = re.search(r"\(os error (\d+)\)", str(error))
    return (int(match[1]), os.strerror(int(match[1]))) if match else (None, "")


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """A path to write at; when the block has ended the file is synced and renamed to `target`. Errors: OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=TEMPORARY, ignore_cleanup_errors=True) as folder:
        made = Path(folder, target.name)
        yield made
        sync(made)
        made.replace(target)


def sync(file: Path) -> None:
    """Wait until a file is on the disk, where a crash of the machine does not change it."""
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())


def remove_leftovers(folder: Path) -> None:
    """Delete what processes that died left unfinished in a folder of the cache."""
    for left in folder.glob(f"{TEMPORARY}*"):
        with suppress(OSError):  # another process removes it, or finishes it
            parts = [left, *(left.iterdir() if left.is_dir() else ())]
            if max(part.lstat().st_mtime for part in parts) < time.time() - LEFT_AFTER:
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write an object of JSON with its digest. Errors: OSError."""
    content = json.loads(json.dumps(content))  # keys as they will be read
    with new_file(file) as made:
        made.write_text(json.dumps({**content, "digest": _digest(content)}, indent=1) + "\n", encoding="utf-8")


def read_json(file: Path) -> dict[str, Any]:
    """What `write_json` wrote. Errors: OSError where there is no file, DamagedFile where it was changed."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.pop("digest") == _digest(content):
            return content
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    raise DamagedFile(f"{file} is damaged, or of an earlier version")


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_manifest(manifest: Path, folder: Path, names: Iterable[str] | None = None, /, **fields: str) -> None:
    """Write `fields` with the sizes and digests of a folder's files, or of those of these names. Errors: OSError."""
    files = sorted(names or (file.name for file in folder.iterdir() if file.is_file()))
    sizes = {name: (folder / name).stat().st_size for name in files}
    digests = {name: sha256_of_file(folder / name) for name in files}
    write_json(manifest, {**fields, "files": sizes, "digests": digests})


def find_damage(manifest: Path, folder: Path) -> list[Path] | None:
    """The files of a folder that are not as a manifest says, or the manifest itself; None where there is none.

    Small files are read. A large one is only if its size, inode or times are not those of the last time it was read,
    or if that is a week ago: the time of its last change cannot be set back, as the one of its content can.
    """
    try:
        content = read_json(manifest)
        sizes, digests = content["files"], content["digests"]
    except OSError:
        return None
    except (DamagedFile, LookupError):
        return [manifest]
    checks = manifest.with_suffix(".checked")
    try:
        known = read_json(checks)
    except (OSError, ValueError):
        known = {}
    states = {
        name: _state_if_whole(folder / name, size, digests[name], known.get(name)) for name, size in sizes.items()
    }
    last_reads = {name: state for name, state in states.items() if state}
    if last_reads != known:
        with suppress(OSError):  # a full or read-only disk: they are read again the next time
            write_json(checks, last_reads)
    return [folder / name for name, state in states.items() if state is None]


def _state_if_whole(file: Path, size: int, digest: str, known: list[int] | None) -> list[int] | None:
    """When a file was last read, and its state then, if it need not be read the next time; None if it is damaged."""
    try:
        stat, now = file.stat(), time.time()
        if stat.st_size != size:
            return None
        state = [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]
        if known and known[1:] == state and 0 <= now - known[0] < READ_AGAIN_AFTER:
            return known
        if sha256_of_file(file) != digest:
            return None
    except OSError:
        return None
    settled = now - max(stat.st_mtime, stat.st_ctime) > SETTLED_AFTER
    return [int(now), *state] if settled and size >= ALWAYS_READ else []


def is_whole(manifest: Path, folder: Path, report: bool = False) -> bool:
    """True if all files of a folder are as the manifest says; `report` logs a line where one is damaged."""
    damaged = find_damage(manifest, folder)
    if damaged and report:
        report_damage(damaged[0])
    return damaged == []


def report_damage(file: Path, consequence: str = "it is made again") -> None:
    """Log that a file of the cache is not as it was written."""
    log.warning("%s is damaged, or of an earlier version; %s", file, consequence)


@contextmanager
def new_file_with_digest(target: Path) -> Iterator[Path]:
    """As `new_file`; a manifest beside it lets `has_digest` notice a damaged file. Errors: OSError."""
    with new_file(target) as made:
        yield made
        write_manifest(made.with_name("manifest"), made.parent, [made.name])
        made.with_name("manifest").replace(_manifest_of(target))


def has_digest(target: Path) -> bool:
    """True for a file as `new_file_with_digest` wrote it; logs a line where it is damaged."""
    remove_leftovers(target.parent)
    return target.exists() and is_whole(_manifest_of(target), target.parent, report=True)


def _manifest_of(target: Path) -> Path:
    return target.with_suffix(".json")


def sha256_of_file(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as bytes_in:
        return hashlib.file_digest(bytes_in, "sha256").hexdigest()


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


def is_own_file(file: Path) -> bool:
    """True for a whole file that `new_file_with_digest` wrote for this user, and that nobody else can change."""
    try:
        found = file.lstat()
    except OSError:
        return False
    return (
        stat.S_ISREG(found.st_mode)
        and found.st_uid in _trusted_owners()
        and not found.st_mode & WRITABLE_BY_OTHERS
        and has_digest(file)
    )


def _trusted_owners() -> set[int]:
    """This user and the administrator; systems without owners have one that fits all."""
    return {0, getattr(os, "getuid", lambda: 0)()}
