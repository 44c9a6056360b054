"""Fetch a model by huggingface_hub into the cache shared with Transformers; tolerate an unreachable hub.

The hub's client resumes downloads, shares them between processes, and records which files a snapshot has. What it does
not do is here: no network where the files are there, a limit for the hub's first answer, the choice of weight files,
the disk's space, and errors of one line.
"""

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from saltus.loading.fetching import SourceError, as_source_errors, first_line, require_disk_space
from saltus.loading.model_folders import (
    HEADS_FILE,
    INDEX_FILE,
    MASK_FILE,
    PAIRWISE_CORRECTION_FILE,
    WEIGHT_FILE_PATTERNS,
    check_folder,
)
from saltus.loading.progress import ProgressCallback, Stage
from saltus.loading.split_gguf import find_gguf, part_names
from saltus.loading.time_limit import answer_within

GATED = "{} is given only to those who accept its licence; do so on its page and log in with `hf auth login`"
HUB_TIMEOUT = 6.0  # seconds for the hub's first answer
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")

FileChoice = Callable[[dict[str, int]], list[str]]  # of a repository's files, with their sizes in bytes


class _HubUnreachable(Exception):
    """The hub did not answer; the message is the reason."""


def fetch_from_hub(name: str, offline: bool, progress: ProgressCallback) -> Path:
    """The snapshot of `owner/name@revision` with what Transformers needs of it. Errors: SourceError."""
    folder = _fetch(name, lambda sizes: _model_files(name, sizes), check_folder, offline, progress)
    check_folder(folder)
    return folder


def fetch_tokenizer_from_hub(name: str, offline: bool, progress: ProgressCallback) -> Path:
    """A folder with the settings and the tokenizer of `owner/name@revision`, perhaps without weights."""
    return _fetch(name, _side_files, lambda folder: _check_any(folder, TOKENIZER_FILES), offline, progress)


def fetch_gguf_from_hub(repository: str, wanted: str, offline: bool, progress: ProgressCallback) -> Path:
    """A GGUF file of `owner/name@revision`, and its other parts: one of that name, or with that end (`Q4_K_M`).

    Errors: SourceError.
    """

    def choose(sizes: Collection[str]) -> list[str]:
        if (file := find_gguf(sizes, wanted)) is not None:
            parts = part_names(file)
            if missing := next((part for part in parts if part not in sizes), None):
                raise SourceError(f"{repository} lacks {missing}, one of {len(parts)} parts; choose another file")
            return parts
        there = ", ".join(sorted(name for name in sizes if name.lower().endswith(".gguf"))) or "none"
        what = "file" if wanted.lower().endswith(".gguf") else "GGUF file of the kind"
        raise SourceError(f"{repository} has no {what} {wanted}; its GGUF files are {there}")

    def choose_there(folder: Path) -> list[str]:
        return choose([path.relative_to(folder).as_posix() for path in folder.rglob("*")])

    folder = _fetch(f"{repository}:{wanted}", choose, choose_there, offline, progress)
    return folder / choose_there(folder)[0]


def _fetch(
    name: str, choose: FileChoice, check: Callable[[Path], object], offline: bool, progress: ProgressCallback
) -> Path:
    """The snapshot of `owner/name@revision:file` with the chosen files.

    It is from the cache, else from the hub, else what another tool left in the cache. `check` raises SourceError
    for a folder of another tool that does not do.
    """
    repository = name.partition(":")[0]
    hub_id, _, revision = repository.partition("@")
    if found := _complete_snapshot(hub_id, revision or None, choose):
        return found
    if offline:
        reason = f"{name} is not in the cache and the network is switched off; pull it once with it on"
    else:
        progress(Stage(f"asking the hub for {repository}"))
        try:
            commit, sizes = _list_files(hub_id, revision or None)
            return _download(repository, commit, {file: sizes[file] for file in choose(sizes)}, progress)
        except _HubUnreachable as silence:
            reason = (
                f"the hub does not answer for {name} ({silence}); check the network or HF_ENDPOINT, or give a local"
                " folder or file"
            )
    if found := _unlisted_snapshot(hub_id, revision or None, check):
        return found
    raise SourceError(reason)


def _complete_snapshot(hub_id: str, revision: str | None, choose: FileChoice) -> Path | None:
    """The snapshot in the cache if it has all chosen files of the list that came with it; no network is touched."""
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        tree = {each.path: each.size for each in get_cached_repo_tree(hub_id, revision=revision)}
        files = choose(tree)
        folder = Path(snapshot_download(hub_id, revision=revision, allow_patterns=files, local_files_only=True))
        return folder if all((folder / file).stat().st_size == tree[file] for file in files) else None
    except (CachedRepoTreeNotFoundError, OSError, ValueError):
        return None


def _unlisted_snapshot(hub_id: str, revision: str | None, check: Callable[[Path], object]) -> Path | None:
    """A snapshot of another tool, which left no list of files; no network is touched."""
    from huggingface_hub import snapshot_download

    needed = ["config.json", "tokenizer*", "vocab*", "merges.txt", "chat_template*"]  # and weights, which are checked
    try:
        folder = Path(snapshot_download(hub_id, revision=revision, allow_patterns=needed, local_files_only=True))
        check(folder)
    except (OSError, ValueError):
        return None
    return folder


def _check_any(folder: Path, names: Iterable[str]) -> None:
    if not any((folder / name).exists() for name in names):
        raise SourceError(f"{folder} holds none of {', '.join(names)}")


def _list_files(hub_id: str, revision: str | None) -> tuple[str, dict[str, int]]:
    """The commit of a repository's revision, and its files with their sizes in bytes."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    def ask() -> Any:
        return HfApi().model_info(hub_id, revision=revision, files_metadata=True, timeout=HUB_TIMEOUT)

    try:
        found = answer_within(HUB_TIMEOUT, ask)
    except GatedRepoError:
        raise SourceError(GATED.format(hub_id)) from None
    except RevisionNotFoundError:
        raise SourceError(f"{hub_id} has no revision {revision}; look up its branches and tags on the hub") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise SourceError(
            f"the hub has no model {hub_id}; check the spelling, or log in with `hf auth login` if it is private"
        ) from None
    except Exception as error:  # whatever the client's network library raises
        raise _HubUnreachable(first_line(error)) from error
    return found.sha, {each.rfilename: each.size or 0 for each in found.siblings or []}


def hub_answers(data_set: str) -> bool:
    """Whether the hub says in time what it has under the name of a data set, be it nothing."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        answer_within(HUB_TIMEOUT, lambda: HfApi().dataset_info(data_set, timeout=HUB_TIMEOUT))
    except Exception as error:  # whatever the client's network library raises
        return isinstance(error, HfHubHTTPError | HFValidationError)
    return True


def _model_files(name: str, sizes: dict[str, int]) -> list[str]:
    """Those of a repository that Transformers needs, and that come with a model of ours."""
    names = next(
        ([n for n in sizes if kind.fullmatch(n)] for kind in WEIGHT_FILE_PATTERNS if any(map(kind.fullmatch, sizes))),
        [],
    )
    if "model.safetensors.index.json" in sizes and any(n.endswith(".safetensors") for n in names):
        names = [n for n in sizes if "/" not in n and n.endswith(".safetensors") and not n.startswith("consolidated")]
    if INDEX_FILE in sizes:  # its weights are in a GGUF file
        names = [n for n in sizes if n.endswith(".gguf")]
    if "config.json" not in sizes or not names:
        raise SourceError(
            f"{name} holds no weights that Transformers loads; choose a repository with safetensors files"
        )
    beside = [file for file in sizes if file in (PAIRWISE_CORRECTION_FILE, MASK_FILE) or HEADS_FILE.fullmatch(file)]
    return sorted({*names, *_side_files(sizes), *beside})


def _side_files(sizes: dict[str, int]) -> list[str]:
    """Those of a repository's top folder that hold settings and tokenizer."""
    ends = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
    templates = [n for n in sizes if n.startswith("additional_chat_templates/") and n.endswith(".jinja")]
    return [n for n in sizes if "/" not in n and n.endswith(ends)] + templates


def _download(name: str, commit: str, sizes: dict[str, int], progress: ProgressCallback) -> Path:
    """The snapshot of `owner/name@revision` with these files, those of another size than listed fetched again."""
    from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError

    hub_id, _, revision = name.partition("@")
    cache, again = Path(constants.HF_HUB_CACHE), "run it again, it goes on where it stopped"
    found = {file: try_to_load_from_cache(hub_id, file, revision=commit) for file in sizes}
    kept = {file: Path(path) for file, path in found.items() if isinstance(path, str)}
    damaged = [file for file, path in kept.items() if path.stat().st_size != sizes[file]]
    try:
        with as_source_errors(cache, name, "HF_HOME"):
            for file in damaged:
                path = kept.pop(file)
                path.resolve().unlink()  # what it links to
                path.unlink(missing_ok=True)
            missing = sum(size for file, size in sizes.items() if file not in kept)
            require_disk_space(cache, missing, name, "HF_HOME")
            folder = Path(
                snapshot_download(
                    hub_id,
                    revision=revision or None,
                    allow_patterns=list(sizes),
                    tqdm_class=_progress_bar_class(name, sum(sizes.values()), progress),
                )
            )
    except SourceError:
        raise
    except GatedRepoError:  # the hub lists the files of such a repository to everybody
        raise SourceError(GATED.format(hub_id)) from None
    except Exception as error:  # whatever the client's network library raises
        raise SourceError(f"the download of {name} broke off ({first_line(error)}); {again}") from error
    # an interrupted client may return an incomplete snapshot
    if lacking := [file for file in sizes if not (folder / file).exists()]:
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
