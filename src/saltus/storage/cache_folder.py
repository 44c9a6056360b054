"""The folder for what Saltus downloads, converts, compiles and measures."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """SALTUS_CACHE if set, else saltus in XDG_CACHE_HOME, else ~/.cache/saltus. It can be deleted at any time."""
    if named := os.environ.get("SALTUS_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "saltus"
