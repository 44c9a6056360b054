"""Check that a folder holds a model with all of its weights."""

import json
import re
import struct
from pathlib import Path
from typing import Any

from saltus.networks.loading.fetching import SourceError

WEIGHT_FILE_PATTERNS = (
    re.compile(r"model(-\d+-of-\d+)?\.safetensors"),
    re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin"),
    re.compile(r"[^/]+\.safetensors"),
)
INDEX_FILE = "gguf.json"  # beside config.json: the weights are in a GGUF file, and where
MANIFEST = "source.json"  # of a folder in the cache: where it is from, and the digests of its files
PAIRWISE_CORRECTION_FILE = "links.safetensors"  # beside the weights of an any-subset model
MASK_FILE = (
    "mask_embedding.pt"  # beside those of some DFlash drafters: what queries start with, if no token's embedding
)


def check_folder(folder: Path) -> None:
    """Raise SourceError unless the folder holds a configuration and whole weights."""
    if not folder.is_dir():
        raise SourceError(f"{folder} is a file; give the folder that holds config.json and the weights")
    if not (folder / "config.json").is_file():
        kind = "an adapter, not a model: give its base model" if (folder / "adapter_config.json").exists() else ""
        raise SourceError(
            f"{folder} holds {kind or 'no model (config.json is missing): give a folder that save_pretrained wrote'}"
        )
    if (folder / INDEX_FILE).is_file():
        return
    weights = weight_files(folder)
    if not weights:
        raise SourceError(
            f"{folder} has a config.json but no weights (*.safetensors or pytorch_model*.bin);"
            " copy them there, or save the model again with save_pretrained"
        )
    for file in weights:
        if not file.exists():
            raise SourceError(
                f"{folder} lacks {file.name}, which its index names; copy it there, or fetch the model again"
            )
        if file.suffix == ".safetensors":
            _read_safetensors_header(file)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights, safetensors first; those that an index names even if they are missing."""
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (folder / index).is_file():
            return [
                folder / name for name in sorted(set(json.loads((folder / index).read_text())["weight_map"].values()))
            ]
    for kind in WEIGHT_FILE_PATTERNS:
        if found := sorted(file for file in folder.iterdir() if kind.fullmatch(file.name)):
            return found
    return []


def _read_safetensors_header(file: Path) -> tuple[dict[str, Any], int]:
    """The tensors that a safetensors file lists, and where their bytes begin."""
    size = file.stat().st_size
    with file.open("rb") as bytes_in:
        prefix = bytes_in.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        try:
            header = json.loads(bytes_in.read(length)) if length < size else {}
            header.pop("__metadata__", None)
            expected = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        except (ValueError, AttributeError, TypeError, LookupError):
            raise SourceError(f"{file} is not a safetensors file, or a damaged one; copy or fetch it again") from None
    if size < expected:
        raise SourceError(f"{file} is cut short ({size:,} of {expected:,} bytes); copy or fetch it again")
    return header, 8 + length
