"""Save the settings that `saltus tune` found best for a model on this machine; `load` uses them if none are given."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from saltus.kernels.native.processor import processor_name
from saltus.storage.cache_files import disk_errors, read_json, report_damage, write_json
from saltus.storage.cache_folder import cache_folder


@dataclass(frozen=True)
class TunedSettings:
    """Options of a method, and the draft tokens of a call, for a model on a machine."""

    method: str
    model: str
    machine: str
    adapter: str = ""  # the adapter that drafts, if there is one
    fingerprint: str = ""  # of the model's weights
    options: Mapping[str, Any] = field(default_factory=dict)
    max_draft_tokens: int = 16
    made: Mapping[str, Any] = field(default_factory=dict)  # command, commit, measurements

    @property
    def path(self) -> Path:
        key = "|".join((self.method, _resolved(self.model), self.machine, _resolved(self.adapter)))
        return cache_folder() / "profiles" / f"{blake2b(key.encode(), digest_size=12).hexdigest()}.json"

    def save(self) -> Path:
        """Write the file; `load` uses it from now on. Errors: ValueError if the cache cannot be written."""
        with disk_errors(cache_folder(), f"the tuned settings of {self.model}"):
            write_json(self.path, asdict(self))
        return self.path


def find_tuned_settings(method: str, model: str, machine: str, adapter: str = "") -> TunedSettings | None:
    """The saved settings, or None; a damaged file counts as none and is named in a warning."""
    path = TunedSettings(method, model, machine, adapter).path
    try:
        return TunedSettings(**read_json(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        report_damage(path, "it is not used: run saltus tune again")
        return None


def _resolved(path_or_name: str) -> str:
    """The absolute path of a folder; a name stays as it is."""
    return str(Path(path_or_name).resolve()) if path_or_name and Path(path_or_name).is_dir() else path_or_name


def machine_name(device: torch.device) -> str:
    """The processor and its number of cores, or the name of the GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}, {os.cpu_count()} cores"


def memory_bytes() -> int | None:
    """The memory of this machine; None where it does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
