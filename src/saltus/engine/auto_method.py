"""Choose what the method `auto` stands for with a model: what drafts best without any settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from saltus.core.control.call_cost import CallCost
from saltus.engine.calibration import call_seconds
from saltus.methods import AUTO
from saltus.methods.mtp.files import has_heads
from saltus.methods.shared.drafter_files import find_shipped
from saltus.models.protocols import TargetNetwork

# Of a call of eight rows, as a multiple of one row's: the shipped drafter decides about as many tokens in such a call.
MAX_COST_OF_EIGHT_ROWS = 1.75


def resolve_method(
    method: str, target: TargetNetwork, options: Mapping[str, Mapping[str, Any]], call_cost: CallCost, rule: str
) -> str:
    """The method itself, or for `auto`: `assd` for an any-subset model, `ptp+lookup` where a drafter is given by the
    option `ptp.model`, `mtp+lookup` where the model's checkpoint has heads for multi-token prediction, `ptp+lookup`
    where a drafter comes with the package and pays on this machine, else `lookup`.

    Whether it pays depends on what more rows of a call cost; they are timed if `call_cost` has no times yet. Under
    `reject` the text depends on the method, so times decide nothing and the drafter must be given.
    """
    if method != AUTO:
        return method
    if target.any_subset:
        return "assd"
    if not target.accepts_drafters:
        return "lookup"
    if "model" in options.get("ptp", {}):
        return "ptp+lookup"
    if has_heads(target.model):
        return "mtp+lookup"
    if rule == "reject" or find_shipped("drafter", target.model) is None:
        return "lookup"
    if not call_cost.seconds:
        call_cost.seconds.update(call_seconds(target))
    pays = call_cost.seconds_for(8) <= MAX_COST_OF_EIGHT_ROWS * call_cost.seconds_for(1)
    return "ptp+lookup" if pays else "lookup"
