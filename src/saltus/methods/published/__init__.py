"""Drafters of other projects, which the method ptp drafts with: a file is a form, found by what a folder says.

A file with `recognises` and `load_network` (`PublishedForm`) is a form of this name; the other files are what forms
share.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from saltus.loading.metadata import METADATA_FILE, read_metadata
from saltus.methods.shared.published_files import CONFIG_FILE, read_config
from saltus.models.protocols import TargetNetwork


@runtime_checkable
class PublishedForm(Protocol):
    """A file of this folder."""

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """True for the config.json of such a drafter; it may hold anything."""
        ...

    def load_network(self, folder: Path, target: TargetNetwork, target_name: str) -> Any:
        """The drafter for this target as a network, whose `model.shape.hidden_state_layers` says what it reads.

        Errors: ValueError of one line for missing or unknown weights, other sizes, and what is not computed.
        """
        ...


@lru_cache
def published_forms() -> Mapping[str, PublishedForm]:
    """The forms by their names."""
    names = [name for _, name, is_folder in pkgutil.iter_modules(__path__) if not is_folder]
    modules = {name: import_module(f"{__name__}.{name}") for name in names}
    return {name: module for name, module in modules.items() if isinstance(module, PublishedForm)}


def find_form(folder: Path) -> PublishedForm | None:
    """The form of a folder: by the network that saltus.json names, or by config.json; None for a drafter of Saltus.

    Errors: ValueError for a published drafter of no form.
    """
    if (folder / METADATA_FILE).exists():
        return published_forms().get(str(read_metadata(folder, "drafter").settings.get("network")))
    config = read_config(folder)
    if not config:
        return None
    for form in published_forms().values():
        if form.recognises(config):
            return form
    if config.get("speculators_model_type") == "mtp":
        raise ValueError(
            f"{folder} holds heads for multi-token prediction, which mtp drafts with; give it as mtp.model"
        )
    flat = config.get("dflash_config")
    names = [config.get("speculators_model_type"), flat.get("projector_type") if isinstance(flat, dict) else None]
    names = next(filter(None, [*names, config.get("architectures")]), config.get("model_type"))
    named = f" ({names!r})" if names else ""
    raise ValueError(
        f"{folder / CONFIG_FILE} is that of no drafter that Saltus knows{named}; the forms are"
        f" {', '.join(published_forms())}"
    )
