"""Fetch files: resume interrupted downloads, and never take an incomplete folder for a complete one."""

import errno
import hashlib
import json
import os
import shutil
import ssl
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError

from filelock import FileLock, Timeout
from rich.filesize import decimal

from saltus.native.cache_folder import cache_folder
from saltus.networks.loading.progress import Progress, Stage

NETWORK_ERRORS = (URLError, TimeoutError, ConnectionError, HTTPException, ssl.SSLError)


class SourceError(ValueError):
    """A model cannot be had; the message is one line that says why and what to do."""


def write_manifest(file: Path, files_of: Path, **fields: str) -> None:
    """Write `fields` to `file`, with the names and sizes of the files in `files_of`."""
    sizes = {each.name: each.stat().st_size for each in sorted(files_of.iterdir()) if each.is_file()}
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.write_text(json.dumps({**fields, "files": sizes}, indent=2) + "\n")
    draft.replace(file)


def matches_manifest(manifest: Path, folder: Path) -> bool:
    """True if the folder has every file of the manifest in its recorded size."""
    try:
        sizes = json.loads(manifest.read_text())["files"]
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


@contextmanager
def exclusive_lock(name: str, progress: Progress) -> Iterator[None]:
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
    making = folder.with_name(f".{folder.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    try:
        yield making
        if folder.exists():  # a damaged one: os.replace takes no folder that holds files
            damaged = folder.with_name(f".{folder.name}.damaged")
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


@contextmanager
def as_source_errors(folder: Path, name: str, env_variable: str) -> Iterator[None]:
    """Turn errors of a full or read-only disk into a SourceError with the cure."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SourceError(
                f"the disk of {folder} ran full while {name} was fetched; free some space,"
                f" or name a folder on another disk with {env_variable}"
            ) from error
        if error.errno in (
            errno.EACCES,
            errno.EPERM,
            errno.EROFS,
            errno.ENOTDIR,
            errno.EEXIST,
            errno.ENOENT,
            errno.ELOOP,
        ):
            raise SourceError(
                f"{name} cannot be kept in {folder} ({error.strerror});"
                f" make that folder writable, or name another with {env_variable}"
            ) from error
        raise


def download(url: str, file: Path, size: int, name: str, progress: Progress, *, retry_delay: float = 1.0) -> None:
    """Download `file` of `size` bytes from `url`, resuming where an earlier run stopped.

    Proxies are those of the environment. Three attempts in a row without a new byte end it with the network's error.
    """
    failures = 0
    while _file_size(file) != size:
        before = _file_size(file)
        try:
            _download_rest(url, file, size, name, progress)
            if _file_size(file) <= before:
                raise URLError(f"it ended after {before:,} of {size:,} bytes")
        except NETWORK_ERRORS as error:
            failures = 0 if _file_size(file) > before else failures + 1
            refused = isinstance(error, HTTPError) and error.code < 500 and error.code not in (408, 416, 429)
            if refused or failures == 3:
                raise
            time.sleep(retry_delay)


def _download_rest(url: str, file: Path, size: int, name: str, progress: Progress) -> None:
    have = _file_size(file)
    if have > size:  # another file, or a damaged one
        file.unlink()
        have = 0
    request = urllib.request.Request(
        url, headers={"User-Agent": "saltus"} | ({"Range": f"bytes={have}-"} if have else {})
    )
    with urllib.request.urlopen(request, timeout=20) as response:
        if response.headers.get("Content-Range") is None:
            have = 0
        with file.open("ab" if have else "wb") as out:
            while have < size and (piece := response.read(min(1 << 18, size - have))):
                out.write(piece)
                have += len(piece)
                progress(Stage(f"downloading {name}", have, size))


def _file_size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def sha256_of_file(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as bytes_in:
        return hashlib.file_digest(bytes_in, "sha256").hexdigest()


def first_line(error: BaseException | str) -> str:
    """The first line of an error's message without its full stop, at most 200 characters; else the error's class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200].rstrip(" .:")
