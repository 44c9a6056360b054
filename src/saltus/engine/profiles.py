"""Keep what `saltus tune` found best for a model on this machine; an engine takes it where nobody says otherwise."""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from saltus.networks.cache_folder import cache_folder

log = logging.getLogger("saltus")


@dataclass(frozen=True)
class Profile:
    """Options of a method, and the nodes of a call, for a model on a machine."""

    method: str
    model: str
    machine: str
    adapter: str = ""  # that drafts, where one does
    fingerprint: str = ""  # of the model
    options: Mapping[str, Any] = field(default_factory=dict)
    budget: int = 16
    made: Mapping[str, Any] = field(default_factory=dict)  # how: command, commit, what was measured

    @property
    def path(self) -> Path:
        conditioning = "|".join((self.method, _resolved(self.model), self.machine, _resolved(self.adapter)))
        return cache_folder() / "profiles" / f"{blake2b(conditioning.encode(), digest_size=12).hexdigest()}.json"

    def save(self) -> Path:
        """For every engine from now on."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        return self.path


def find_profile(method: str, model: str, machine: str, adapter: str = "") -> Profile | None:
    """What was saved for them, if anything was; a damaged file is none, and is named in a warning."""
    path = Profile(method, model, machine, adapter).path
    if not path.is_file():
        return None
    try:
        return Profile(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        log.warning("the profile %s is damaged (%s) and not used; run saltus tune again", path, type(error).__name__)
        return None


def _resolved(path_or_name: str) -> str:
    """A folder by its whole path, a name as it is."""
    return str(Path(path_or_name).resolve()) if path_or_name and Path(path_or_name).is_dir() else path_or_name


def machine_name(device: torch.device) -> str:
    """The processor with its cores, or the GPU, whichever computes."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}, {os.cpu_count()} cores"


def processor_name() -> str:
    """Its name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
