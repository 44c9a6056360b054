"""Draft a block of tokens in one pass that fills masks, from the target's hidden states (DFlash, Chen et al. 2026)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saltus.methods.published.dflash_files import MUSE_GLIMMER, load_dflash
from saltus.methods.published.dflash_network import DFlashNetwork
from saltus.models.protocols import TargetNetwork

KINDS = (None, "dflash")  # of what follows the layers


def recognises(config: Mapping[str, Any]) -> bool:
    """True for the config.json of a published DFlash drafter."""
    if config.get("model_type") == MUSE_GLIMMER:
        return True
    if kind := config.get("speculators_model_type"):
        return kind == "dflash"
    flat, architectures = config.get("dflash_config"), config.get("architectures") or ["DFlashDraftModel"]
    return isinstance(flat, dict) and "DFlashDraftModel" in architectures and flat.get("projector_type") in KINDS


def load_network(folder: Path, target: TargetNetwork, target_name: str) -> DFlashNetwork:
    """The drafter for this target, published or trained by Saltus. Errors: ValueError of one line."""
    return DFlashNetwork(load_dflash(folder, target.model, target_name), target)
