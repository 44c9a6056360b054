"""Choose what the method `auto` stands for with a model: what drafts best without any settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from saltus.methods import AUTO
from saltus.networks.loading.drafter_files import find_shipped
from saltus.networks.protocols import TargetNetwork


def resolve_method(method: str, target: TargetNetwork, options: Mapping[str, Mapping[str, Any]]) -> str:
    """The method itself, or for `auto`: `assd` for an any-subset model, `ptp+lookup` where a drafter is given by the
    option `ptp.model` or comes with the package, else `lookup`.
    """
    if method != AUTO:
        return method
    if target.any_subset:
        return "assd"
    if not target.accepts_drafters:
        return "lookup"
    has_drafter = "model" in options.get("ptp", {}) or find_shipped("drafter", target.model) is not None
    return "ptp+lookup" if has_drafter else "lookup"
