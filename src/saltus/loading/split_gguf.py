"""Find GGUF files whatever they are called, and all parts of one that is split."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from saltus.loading.fetching import SourceError

MAGIC = b"GGUF"
PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)
MAX_PARTS = 9999


def is_gguf(file: Path) -> bool:
    """True for a file that begins as GGUF files do, such as a blob of Ollama, or that is called one."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(len(MAGIC)) == MAGIC or file.suffix.lower() == ".gguf"


def part_names(name: str) -> list[str]:
    """The names of all parts of a split file, given that of one; of a whole file its own."""
    match = PART.fullmatch(name)
    count = int(match["count"]) if match else 1
    if match is None or not 1 <= count <= MAX_PARTS:
        return [name]
    return [f"{match['stem']}-{number:05}-of-{match['count']}{match['suffix']}" for number in range(1, count + 1)]


def find_gguf(names: Iterable[str], wanted: str) -> str | None:
    """The file of that name; else the first part of one whose name ends so, such as in `Q4_K_M`, in any case.

    Of several it is the one with the shortest name; those of projectors of images (`mmproj`) are left out. None: there
    is none.
    """
    names = set(names)
    if wanted in names and wanted.lower().endswith(".gguf"):
        return wanted
    ends_so = re.compile(rf"(.*[-./])?{re.escape(wanted)}(-0*1-of-\d{{5}})?\.gguf", re.IGNORECASE)
    found = [name for name in names if ends_so.fullmatch(name) and "mmproj" not in name.lower()]
    return min(found, key=lambda name: (len(name), name), default=None)


def parts_of(file: Path) -> list[Path]:
    """All parts of a file that is split, in order; else the file. Errors: SourceError for a part that is missing."""
    parts = [file.with_name(name) for name in part_names(file.name)]
    if missing := next((part for part in parts if not part.is_file()), None):
        raise SourceError(
            f"{file.name} is one of {len(parts)} parts, and {missing.name} is not beside it; copy or fetch it, too"
        )
    return parts
