"""Read and write saltus.json, which records for which target something was trained, and how."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, get_args

from saltus.loading.model_identity import embedding_signs, is_similar, model_fingerprint

log = logging.getLogger("saltus")

METADATA_FILE = "saltus.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"  # PEFT's, beside the metadata of an adapter
TRAIN_COMMANDS = {
    "drafter": "saltus train ptp",
    "heads": "saltus train mtpc",
    "adapter": "saltus train ptp or saltus train jacobi",
    "model": "saltus train jacobi",
    "mtp-head": "saltus train mtp",
}
OPTIONS = {  # that take a folder of each kind
    "drafter": "ptp.model", "heads": "mtpc.model", "adapter": "ptp.model or jacobi.model", "model": "--model",
    "mtp-head": "mtp.model",
}  # fmt: skip

Kind = Literal["drafter", "heads", "adapter", "model", "mtp-head"]


@dataclass(frozen=True)
class DrafterMetadata:
    """What a folder of `saltus train` holds, and the target that it was trained for."""

    kind: Kind
    target_name: str
    target_fingerprint: str | None  # None for a whole model, which needs no target
    target_signs: str | None = None  # `embedding_signs` of the target; None for a whole model
    settings: Mapping[str, Any] = field(default_factory=dict)  # of DrafterShape, HeadShape or GatedLoraSettings
    training: Mapping[str, Any] = field(default_factory=dict)  # how it was trained
    files: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of each file of an adapter, by name


def read_metadata(folder: Path, expected: Kind | None = None) -> DrafterMetadata:
    """The metadata of a folder. Errors: ValueError if they are missing or damaged, or of another kind than expected."""
    file, what = folder / METADATA_FILE, expected or "drafter"
    cure, give = f"train it again with {TRAIN_COMMANDS[what]}", f"give a folder that {TRAIN_COMMANDS[what]} wrote"
    if what == "drafter":
        give += ", or that of a published drafter (EAGLE-3, DFlash, …)"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no {what} ({METADATA_FILE} is missing); {give}") from None
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); copy it again, or {cure}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{file} is damaged (no JSON object); copy it again, or {cure}")
    if (kind := data.get("kind")) not in get_args(Kind) or expected not in (None, kind):
        give += f", or this one as {option}" if (option := OPTIONS.get(str(kind))) else ""
        raise ValueError(f"{folder} holds no {what}, but something else; {give}")
    try:
        metadata = _parse(data)
        _check_types(metadata)
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{file} was changed or cut short after it was saved; copy it again, or {cure}") from None
    return metadata


def _parse(data: dict[str, Any]) -> DrafterMetadata:
    """The metadata. Raises KeyError or TypeError for wrong keys or a wrong digest."""
    if data["kind"] == "adapter" and data.pop("digest") != _digest(data):
        raise KeyError("digest")
    if missing := {each.name for each in fields(DrafterMetadata)} - set(data):
        raise KeyError(min(missing))
    return DrafterMetadata(**data)


def _check_types(metadata: DrafterMetadata) -> None:
    """Raise TypeError for a field of another type than metadata have."""
    tables = metadata.settings, metadata.training, metadata.files
    texts = metadata.target_fingerprint, metadata.target_signs
    are_texts = isinstance(metadata.target_name, str) and all(text is None or isinstance(text, str) for text in texts)
    if not are_texts or not all(isinstance(table, dict) for table in tables):
        raise TypeError("a field is of another type")


def write_metadata(folder: Path, metadata: DrafterMetadata) -> None:
    """Write saltus.json: the fields of the metadata, and for an adapter a digest of them."""
    data = asdict(metadata)
    if metadata.kind == "adapter":
        data["digest"] = _digest(data)
    (folder / METADATA_FILE).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


class TargetMatch(IntEnum):
    """How near a model is to the target that something was trained for."""

    SAME = 0
    SIMILAR = 1  # the same in another precision, or fine-tuned
    OTHER = 2


def match_target(metadata: DrafterMetadata, model: Any) -> TargetMatch:
    """Compare a model with the target of the metadata."""
    if metadata.target_fingerprint == model_fingerprint(model):
        return TargetMatch.SAME
    signs = metadata.target_signs
    return TargetMatch.SIMILAR if signs and is_similar(signs, embedding_signs(model)) else TargetMatch.OTHER


def check_target(metadata: DrafterMetadata, folder: Path, model: Any, name: str) -> None:
    """Raise ValueError unless a folder was trained for this model; log if it was for another precision of it.

    Drafts are verified, so those for a similar model cannot change a text.
    """
    match = match_target(metadata, model)
    if match == TargetMatch.OTHER:
        raise ValueError(
            f"{folder} was trained for {metadata.target_name} ({metadata.target_fingerprint}), not {name}"
            f" ({model_fingerprint(model)}); train it again with {TRAIN_COMMANDS[metadata.kind]}, or load that model"
        )
    if match == TargetMatch.SIMILAR:
        log.warning(
            "%s was trained for %s, and %s has similar weights, not the same: the text is exact, but perhaps fewer"
            " drafts are accepted", folder.name, metadata.target_name, name,
        )  # fmt: skip


def find_metadata(folder: Path) -> DrafterMetadata | None:
    """The metadata of a folder, None if it is no folder of `saltus train`. Errors: ValueError for damaged metadata."""
    if (folder / ADAPTER_CONFIG_FILE).is_file():
        return read_metadata(folder, "adapter")
    return read_metadata(folder) if (folder / METADATA_FILE).is_file() else None


def _digest(metadata: Mapping[str, Any]) -> str:
    """The hexadecimal SHA-256 of metadata, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()
