"""Read the folders in which others publish drafters: config.json and weights, without running code of the folder."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from saltus.networks.loading.model_folders import weight_files
from saltus.networks.models.exact.packed_weight import select_rows

CONFIG_FILE = "config.json"


def read_config(folder: Path) -> dict[str, Any]:
    """The settings in config.json; none where there is no such file, or a damaged one."""
    try:
        found = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All weights of a folder by name. Errors: ValueError where they are missing or damaged."""
    files = weight_files(folder)
    if not files:
        raise ValueError(f"{folder} has a config.json but no weights (*.safetensors); fetch the drafter again")
    weights: dict[str, Tensor] = {}
    try:
        for file in files:
            pickled = file.suffix == ".bin"
            weights |= torch.load(file, map_location="cpu", weights_only=True) if pickled else load_file(file)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        raise ValueError(f"{folder} is damaged ({error}); fetch the drafter again") from None
    return weights


def is_same(own: Tensor, of_target: Tensor) -> bool:
    """True if a weight of the folder is the target's, so that it can be shared."""
    if own.shape != of_target.shape:
        return False
    rows = torch.arange(len(own), device=of_target.device)
    return torch.equal(own.to(of_target.device, of_target.dtype), select_rows(of_target, rows))
