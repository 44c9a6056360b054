"""Bring what was trained for a target to it: a drafter or heads beside it, or an adapter on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from saltus.networks.adapters import load_adapter
from saltus.networks.drafter import DraftNetwork
from saltus.networks.heads import HeadModel, HeadNetwork
from saltus.networks.trained_files import TRAINED_BY, fingerprint, load_drafter, load_heads, shipped

KINDS = ("drafter", "heads", "adapter")
AUTO = "auto"  # the one that is shipped


def is_trained(where: str) -> bool:
    """Is this no model of its own, but something trained for the target, such as `drafter:FOLDER`?"""
    return where.partition(":")[0] in KINDS


def bring(where: str, network: Any, name: str) -> DraftNetwork | HeadNetwork | None:
    """What was trained for the target of this name; None where it is an adapter, which was attached to the target.

    Errors: ValueError for a folder without one, a damaged one, or one for another target.
    """
    kind, _, place = where.partition(":")
    if kind == "adapter":
        network.attach(load_adapter(Path(place), network.model, fingerprint(network.model), name))
        return None
    folder = shipped(kind, network.model) if place == AUTO else Path(place)
    if folder is None:
        raise ValueError(
            f"Saltus brings no trained {kind} for {name};"
            f" train your own ({TRAINED_BY[kind]} --help), or take a method that needs none, such as lookup"
        )
    model = load_heads(folder, network.model, name) if kind == "heads" else load_drafter(folder, network.model, name)
    network.tap(model.shape.taps)
    return HeadNetwork(model, network) if isinstance(model, HeadModel) else DraftNetwork(model, network)
