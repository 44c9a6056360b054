"""Where tests keep what a compiler takes minutes for: in the user's cache, for later runs of this clone and others."""

import shutil
import time
from contextlib import suppress
from pathlib import Path

from saltus.storage.cache_folder import cache_folder

KEPT_FOR = 14 * 86400  # seconds, after which a build is made again


def kept_builds(kind: str) -> Path:
    """The folder of builds of a kind, whose names say what they were made of; old ones are removed."""
    folder = cache_folder() / "tests" / kind
    folder.mkdir(parents=True, exist_ok=True)
    for build in folder.iterdir():
        with suppress(FileNotFoundError):  # another process removes it
            if build.stat().st_mtime < time.time() - KEPT_FOR:
                shutil.rmtree(build) if build.is_dir() else build.unlink()
    return folder
