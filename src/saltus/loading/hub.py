"""Fetch a model from the Hugging Face hub into the cache shared with Transformers; tolerate an unreachable hub."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from saltus.loading.fetching import (
    SourceError,
    as_source_errors,
    first_line,
    require_disk_space,
)
from saltus.loading.model_folders import (
    INDEX_FILE,
    MASK_FILE,
    PAIRWISE_CORRECTION_FILE,
    WEIGHT_FILE_PATTERNS,
    check_folder,
)
from saltus.loading.progress import ProgressCallback, Stage
from saltus.storage.cache_files import DamagedFile, find_damage, is_whole, read_json, report_damage, write_manifest
from saltus.storage.cache_folder import cache_folder

HUB_TIMEOUT = 6.0  # seconds for the hub's first answer


def fetch_from_hub(name: str, offline: bool, progress: ProgressCallback) -> Path:
    """The snapshot of `owner/name@revision` in the cache that Transformers uses too; downloaded where it lacks."""
    if folder := completed_download(name):
        return folder
    hub_id, _, revision = name.partition("@")
    damaged = _damaged_files(name)
    if offline:
        if not damaged and (folder := _cached_snapshot(hub_id, revision or None)):
            return folder
        raise SourceError(_lacking(name, damaged))
    progress(Stage(f"asking the hub for {name}"))
    try:
        wanted = _list_needed_files(hub_id, revision or None)
    except _HubUnreachable as silence:
        return _cached_although(silence, name, damaged)
    _remove(damaged)
    folder = _download_files(name, wanted, progress)
    check_folder(folder)
    _record(name, folder, wanted)
    return folder


def fetch_file_from_hub(repository: str, file: str, offline: bool, progress: ProgressCallback) -> Path:
    """A file of `owner/name@revision` in the cache that Transformers uses too; downloaded if it is not there."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    hub_id, _, revision = repository.partition("@")
    name = f"{repository}:{file}"
    damaged = _damaged_files(name)
    try:
        path = hf_hub_download(hub_id, file, revision=revision or None, local_files_only=True)
        if not damaged:
            return Path(path)
    except (LocalEntryNotFoundError, EntryNotFoundError):
        pass
    if offline:
        raise SourceError(_lacking(name, damaged))
    progress(Stage(f"asking the hub for {repository}"))
    try:
        sizes = _list_files(hub_id, revision or None)
    except _HubUnreachable as silence:
        raise SourceError(
            f"the hub does not answer for {repository} ({silence}); check the network or HF_ENDPOINT, or give a file"
        ) from silence
    if file not in sizes:
        there = sorted(name for name in sizes if name.endswith(".gguf"))
        raise SourceError(f"{repository} has no file {file}; its GGUF files are {', '.join(there) or 'none'}")
    _remove(damaged)
    folder = _download_files(repository, {file: sizes[file]}, progress)
    _record(name, folder, [file])
    return folder / file


def _lacking(name: str, damaged: list[Path]) -> str:
    """An error where the network is switched off."""
    state = f"damaged in the cache ({damaged[0]})" if damaged else "not in the cache"
    return f"{name} is {state} and the network is switched off; pull it once with it on"


def _cached_although(silence: _HubUnreachable, name: str, damaged: Sequence[Path] = ()) -> Path:
    """What another tool has fetched, where the hub does not answer. Errors: SourceError."""
    hub_id, _, revision = name.partition("@")
    if not damaged and (folder := _cached_snapshot(hub_id, revision or None)):
        return folder
    raise SourceError(
        f"the hub does not answer for {name} ({silence}); check the network or HF_ENDPOINT, or give a local folder"
    ) from silence


def fetch_tokenizer_from_hub(name: str, offline: bool, progress: ProgressCallback) -> Path:
    """A folder with the settings and the tokenizer of `owner/name@revision`, perhaps without weights."""
    if folder := completed_download(name):
        return folder
    if offline:
        return fetch_from_hub(name, offline, progress)
    hub_id, _, revision = name.partition("@")
    progress(Stage(f"asking the hub for {name}"))
    try:
        sizes = _list_files(hub_id, revision or None)
    except _HubUnreachable as silence:
        return _cached_although(silence, name)
    return _download_files(name, {file: sizes[file] for file in _side_files(sizes)}, progress)


def _manifest_path(name: str) -> Path:
    return cache_folder() / "hub" / f"{re.sub('[/:]', '--', name)}.json"


def _record(name: str, folder: Path, files: Iterable[str]) -> None:
    """Write down that a download is whole, with the digests of its files."""
    with as_source_errors(cache_folder(), name, "SALTUS_CACHE"):
        write_manifest(_manifest_path(name), folder, files, hub_id=name, folder=str(folder))


def _damaged_files(name: str) -> list[Path]:
    """The files of a download that are not as they arrived, with a line that says so."""
    try:
        folder = Path(read_json(_manifest_path(name))["folder"])
    except OSError:
        return []
    except DamagedFile:
        report_damage(_manifest_path(name), "the hub is asked again")
        return []
    damaged = [file for file in find_damage(_manifest_path(name), folder) or () if file.exists()]
    if damaged:
        report_damage(damaged[0], "it is downloaded again")
    return damaged


def _remove(damaged: Iterable[Path]) -> None:
    """Delete files of a snapshot, and what its links point to: the hub's client takes what is there for whole."""
    for file in damaged:
        file.resolve().unlink(missing_ok=True)
        file.unlink(missing_ok=True)


def completed_download(name: str) -> Path | None:
    """The snapshot that an earlier run has downloaded whole, if it is still whole."""
    try:
        folder = Path(read_json(_manifest_path(name))["folder"])
    except (OSError, ValueError):
        return None
    return folder if is_whole(_manifest_path(name), folder) else None


def _cached_snapshot(hub_id: str, revision: str | None) -> Path | None:
    """A snapshot that looks whole in the hub's own cache; the network is not touched."""
    from huggingface_hub import snapshot_download

    needed = ["config.json", "tokenizer*", "vocab*", "merges.txt", "chat_template*"]  # and weights, which are checked
    try:
        folder = Path(snapshot_download(hub_id, revision=revision, allow_patterns=needed, local_files_only=True))
        check_folder(folder)
    except (OSError, ValueError):
        return None
    return folder


class _HubUnreachable(Exception):
    """The hub did not answer; the message is the reason."""


def _list_files(hub_id: str, revision: str | None) -> dict[str, int]:
    """The files of a repository, with their sizes in bytes."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    def ask() -> Any:
        return HfApi().model_info(hub_id, revision=revision, files_metadata=True, timeout=HUB_TIMEOUT)

    try:
        siblings = _run_with_timeout(HUB_TIMEOUT, ask).siblings or []
    except GatedRepoError:
        raise SourceError(
            f"{hub_id} is given only to those who accept its licence; do so on its page and log in with `hf auth login`"
        ) from None
    except RevisionNotFoundError:
        raise SourceError(f"{hub_id} has no revision {revision}; look up its branches and tags on the hub") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise SourceError(
            f"the hub has no model {hub_id}; check the spelling, or log in with `hf auth login` if it is private"
        ) from None
    except Exception as error:  # whatever the client's network library raises
        raise _HubUnreachable(first_line(error)) from error
    return {each.rfilename: each.size or 0 for each in siblings}


def _list_needed_files(hub_id: str, revision: str | None) -> dict[str, int]:
    """The files that Transformers needs, with their sizes in bytes."""
    sizes = _list_files(hub_id, revision)
    names = next(
        ([n for n in sizes if kind.fullmatch(n)] for kind in WEIGHT_FILE_PATTERNS if any(map(kind.fullmatch, sizes))),
        [],
    )
    if INDEX_FILE in sizes:  # its weights are in a GGUF file
        names = [n for n in sizes if n.endswith(".gguf")]
    if "config.json" not in sizes or not names:
        raise SourceError(
            f"{hub_id} holds no weights that Transformers loads; choose a repository with safetensors files"
        )
    aside = _side_files(sizes)
    aside += [file for file in (PAIRWISE_CORRECTION_FILE, MASK_FILE) if file in sizes]
    return {n: sizes[n] for n in {*names, *aside}}


def _side_files(files: Iterable[str]) -> list[str]:
    """Those of a repository's top folder that hold settings and tokenizer."""
    return [n for n in files if "/" not in n and n.endswith((".json", ".txt", ".model", ".jinja", ".py", ".tiktoken"))]


def _run_with_timeout(seconds: float, function: Callable[[], Any]) -> Any:
    """The answer, or TimeoutError: a name server or a retry may hold a call far longer than its own timeout."""
    answers: list[tuple[bool, Any]] = []

    def ask() -> None:
        try:
            answers.append((True, function()))
        except BaseException as error:
            answers.append((False, error))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} seconds")
    good, answer = answers[0]
    if good:
        return answer
    raise answer


def _download_files(name: str, file_sizes: dict[str, int], progress: ProgressCallback) -> Path:
    """The snapshot of `owner/name@revision` with these files."""
    from huggingface_hub import constants, snapshot_download

    hub_id, _, revision = name.partition("@")
    cache = Path(constants.HF_HUB_CACHE)
    reports = _progress_bar_class(name, sum(file_sizes.values()), progress)
    again = "run it again, it goes on where it stopped"
    try:
        with as_source_errors(cache, name, "HF_HOME"):
            if _cached_snapshot(hub_id, revision or None) is None:
                require_disk_space(cache, sum(file_sizes.values()), name, "HF_HOME")
            files = sorted(file_sizes)
            downloaded = snapshot_download(hub_id, revision=revision or None, allow_patterns=files, tqdm_class=reports)
    except SourceError:
        raise
    except Exception as error:  # whatever the client's network library raises
        raise SourceError(f"the download of {name} broke off ({first_line(error)}); {again}") from error
    folder = Path(downloaded)
    # an interrupted client may return an incomplete snapshot
    if lacking := [file for file in file_sizes if not (folder / file).exists()]:
        raise SourceError(f"the download of {name} broke off before {lacking[0]}; {again}")
    return folder


def _progress_bar_class(name: str, total: int, progress: ProgressCallback) -> type:
    """A class of progress bars for the hub's client: it draws nothing and reports bytes to `progress`."""
    from tqdm import tqdm

    done: dict[int, int] = {}

    class Forward(tqdm):
        """Pass the bytes of the hub's client to `progress`."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.in_bytes = options.get("unit") == "B"
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            if self.in_bytes:
                done[id(self)] = done.get(id(self), 0) + int(n or 0)
                progress(Stage(f"downloading {name}", min(max(done.values()), total), total))

    return Forward
