"""Bring what was trained for a target to it: a drafter or heads beside it, or an adapter on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from saltus.networks.adapters import load_adapter, read_papers
from saltus.networks.drafter import DraftNetwork
from saltus.networks.heads import HeadModel, HeadNetwork
from saltus.networks.trained_files import TRAINED_BY, fingerprint, load_drafter, load_heads, shipped

KINDS = ("drafter", "heads", "adapter")
AUTO = "auto"  # the one that is shipped
ITERATES = "iterate"  # the form of adapters whose rows read guesses, and not uniforms


def is_trained(where: str) -> bool:
    """Is this no model of its own, but something trained for the target, such as `drafter:FOLDER`?"""
    return where.partition(":")[0] in KINDS


def bring(where: str, network: Any, name: str, drafts: str = "") -> DraftNetwork | HeadNetwork | None:
    """What was trained for the target of this name; None where it is an adapter, which was attached to the target.

    `drafts`: the method that it is for, where that is known. Errors: ValueError for a folder without one, a damaged
    one, or one for another target or method.
    """
    kind, _, place = where.partition(":")
    if kind == "adapter":
        if Path(place, "config.json").is_file() and not Path(place, "adapter_config.json").exists():
            raise ValueError(f"{place} holds a model, not an adapter; load it by --model")
        form = read_papers(Path(place))["training"].get("form")
        maker = "jacobi" if form == ITERATES else "ptp"
        if form and drafts and maker != drafts:
            raise ValueError(f"{place} holds an adapter for the method {maker}, not {drafts}; give it to {maker}")
        own = str(Path(place).resolve())
        if network.adapter is not None and network.adapter.place not in ("", own):
            raise ValueError(
                f"{name} carries the adapter of {network.adapter.place}, and a model has room for one; load it once"
                f" more for {place}"
            )
        adapter = load_adapter(Path(place), network.model, fingerprint(network.model), name)
        adapter.place = own
        network.attach(adapter)
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
