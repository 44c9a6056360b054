"""Bring what was trained for a target to it: a drafter beside it, or an adapter on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from saltus.networks.adapters import load_adapter
from saltus.networks.drafter import DraftNetwork
from saltus.networks.drafter_files import fingerprint, load_drafter, shipped

KINDS = ("drafter", "adapter")
AUTO = "auto"  # the one that is shipped


def is_trained(where: str) -> bool:
    """Is this no model of its own, but something trained for the target, such as `drafter:FOLDER`?"""
    return where.partition(":")[0] in KINDS


def bring(where: str, network: Any, name: str) -> DraftNetwork | None:
    """The network of a drafter for the target of this name, or None where an adapter was attached to the target itself.

    Errors: ValueError for a folder without one, a damaged one, or one for another target.
    """
    kind, _, place = where.partition(":")
    if kind == "adapter":
        network.attach(load_adapter(Path(place), network.model, fingerprint(network.model), name))
        return None
    folder = shipped(network.model) if place == AUTO else Path(place)
    if folder is None:
        raise ValueError(
            f"no trained drafter comes with Saltus for {name};"
            " train one (saltus train ptp --help), or take a method that needs none, such as lookup"
        )
    model = load_drafter(folder, network.model, name)
    network.tap(model.shape.taps)
    return DraftNetwork(model, network)
