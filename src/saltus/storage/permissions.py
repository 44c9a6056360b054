"""Let files of weights be read by whom new files may be read by: safetensors writes them for their owner alone."""

from __future__ import annotations

import stat
import tempfile
from contextlib import suppress
from pathlib import Path


def reset_permissions(folder: Path) -> None:
    """Give a folder's files of safetensors the permissions of a new file, where they are this user's."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as temporary:
        new_file = Path(temporary, "file")
        new_file.touch()
        mode = stat.S_IMODE(new_file.stat().st_mode)
    for file in folder.glob("*.safetensors"):
        with suppress(OSError):
            file.chmod(mode)
