"""Keep the drafters that a server has trained in the cache folder, so that the next start begins with the last one."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from saltus.loading.fetching import atomic_folder
from saltus.loading.model_folders import MANIFEST
from saltus.loading.model_identity import model_fingerprint
from saltus.methods.ptp.network import DraftModel
from saltus.methods.shared.drafter_files import save_drafter
from saltus.storage.cache_files import disk_errors, find_damage, report_damage, write_manifest
from saltus.storage.cache_folder import cache_folder


class LearnedDrafters:
    """The folder for one model, one first drafter and one group: the texts of others had no part in it."""

    def __init__(self, target: Any, target_name: str, first: bytes, group: str) -> None:
        """`first` identifies the drafter that training began with, `group` the clients whose texts it learns from.

        A short digest of the group names the folder, so that no API key is written.
        """
        key = b"|".join((model_fingerprint(target).encode(), first, group.encode()))
        self.target, self.target_name = target, target_name
        self.folder = cache_folder() / "learned" / blake2b(key, digest_size=8).hexdigest()

    def latest(self) -> Path | None:
        """The folder of the last drafter that was saved; a damaged one is removed."""
        for folder in sorted(self.folder.glob("[0-9]*"), reverse=True):
            damaged = find_damage(folder / MANIFEST, folder)
            if damaged == []:
                return folder
            report_damage(damaged[0] if damaged else folder, "what was learned is forgotten")
            shutil.rmtree(folder, ignore_errors=True)

    def save(self, model: DraftModel, card: Mapping[str, Any]) -> Path:
        """Save a drafter beside the ones before it, and remove these: there is always a whole one."""
        before = self.latest()
        saved = self.folder / f"{1 if before is None else int(before.name) + 1:06d}"
        with disk_errors(cache_folder(), "what was learned"), atomic_folder(saved) as new:
            save_drafter("drafter", model, new, self.target_name, self.target, card)
            write_manifest(new / MANIFEST, new)
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)
        return saved

    def reset(self) -> None:
        """Forget what was learned."""
        for folder in self.folder.glob("[0-9]*"):
            shutil.rmtree(folder, ignore_errors=True)
