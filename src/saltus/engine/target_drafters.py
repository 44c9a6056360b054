"""Load a drafter or heads for a target, or attach an adapter to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from saltus.loading.fetching import first_line
from saltus.loading.metadata import ADAPTER_CONFIG_FILE, TRAIN_COMMANDS, read_metadata
from saltus.loading.sources import HUB_ID, SourceError, resolve
from saltus.methods.mtpc.files import load_heads
from saltus.methods.mtpc.heads import own_heads
from saltus.methods.mtpc.network import HeadNetwork
from saltus.methods.ptp.files import load_drafter
from saltus.methods.ptp.network import DraftNetwork
from saltus.methods.published import find_form
from saltus.methods.shared.adapter_files import load_adapter
from saltus.methods.shared.drafter_files import find_shipped
from saltus.methods.shared.published_files import warn_of_another_target
from saltus.models.protocols import DrafterHost, TargetNetwork

DRAFTER_KINDS = ("drafter", "heads", "adapter")
SHIPPED_DRAFTER = "auto"  # the one that comes with the package, else the target's own heads
JACOBI_FORM = "iterate"  # the form of adapters for token queries


def is_drafter_spec(spec: str) -> bool:
    """True for something trained for the target, such as `drafter:FOLDER`; false for a model of its own."""
    return spec.partition(":")[0] in DRAFTER_KINDS


def load_drafter_for_target(spec: str, target: TargetNetwork, target_name: str, method: str = "") -> Any:
    """The network of the drafter or heads for the target of this name; None for an adapter, which is attached to it.

    `method` is the method that uses it, if known. Errors: ValueError for a folder without one, a damaged
    one, or one for another target or method.
    """
    kind, _, place = spec.partition(":")
    try:
        return _load_drafter(kind, place, target, target_name, method)
    except (ValueError, ImportError, NameError):  # an installation that is not whole is no fault of the files
        raise
    except Exception as error:  # its files may come from anybody, and hold numbers of any kind
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"the {kind} in {place} does not load ({reason}); fetch or train it again") from error


def _load_drafter(kind: str, place: str, target: TargetNetwork, target_name: str, method: str) -> Any:
    if not target.accepts_drafters:
        raise ValueError(
            f"{target_name} fills holes anywhere, but drafters, heads and adapters are for causal models; take assd"
        )
    assert isinstance(target, DrafterHost)
    if kind == "adapter":
        if Path(place, "config.json").is_file() and not Path(place, ADAPTER_CONFIG_FILE).exists():
            raise ValueError(f"{place} holds a model, not an adapter; load it by --model")
        form = read_metadata(Path(place), "adapter").training.get("form")
        maker = "jacobi" if form == JACOBI_FORM else "ptp"
        if form and method and maker != method:
            raise ValueError(f"{place} holds an adapter for the method {maker}, not {method}; give it to {maker}")
        adapter_folder = str(Path(place).resolve())
        if target.adapter is not None and target.adapter.folder not in ("", adapter_folder):
            raise ValueError(
                f"{target_name} has the adapter of {target.adapter.folder}, and a model has room for one; load it"
                f" once more for {place}"
            )
        adapter = load_adapter(Path(place), target.model, target_name)
        adapter.folder = adapter_folder
        target.attach_adapter(adapter)
        return None
    folder = find_shipped(kind, target.model) if place == SHIPPED_DRAFTER else _drafter_folder(place)
    if folder is None and kind == "heads" and (heads := own_heads(target.model)) is not None:
        return HeadNetwork(heads, target)
    if folder is None:
        raise ValueError(
            f"Saltus brings no trained {kind} for {target_name};"
            f" train your own ({TRAIN_COMMANDS[kind]} --help), or take a method that needs none, such as lookup"
        )
    network: Any
    if kind == "heads":
        network = HeadNetwork(load_heads(folder, target.model, target_name), target)
    elif (form := find_form(folder)) is not None:
        network = form.load_network(folder, target, target_name)
        warn_of_another_target(folder, target_name)
    else:
        network = DraftNetwork(load_drafter(folder, target.model, target_name), target)
    target.add_hidden_state_layers(network.model.shape.hidden_state_layers)
    return network


def _drafter_folder(place: str) -> Path:
    """A folder, or the folder of a hub's repository that has been fetched. Errors: SourceError."""
    if Path(place).exists() or not HUB_ID.fullmatch(place):
        return Path(place)
    try:
        return resolve(place)
    except SourceError as error:
        raise SourceError(f"there is no folder {place} here, and as a hub id: {error}") from None
