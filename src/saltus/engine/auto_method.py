"""Choose what the method `auto` stands for with a model: what drafts best without any settings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from saltus.core.control.call_cost import CallCost
from saltus.engine.calibration import call_seconds
from saltus.methods import AUTO
from saltus.methods.mtp.files import has_heads
from saltus.methods.shared.drafter_files import find_shipped
from saltus.models.protocols import TargetNetwork

log = logging.getLogger("saltus")

WITH_HEADS, WITH_DRAFTER, WITH_DRAFT_MODEL = "mtp+lookup", "ptp+lookup", "small_model+lookup"
# Of a call of eight rows, as a multiple of one row's: where it is more, `lookup` alone was as fast as with the drafter.
MAX_COST_OF_EIGHT_ROWS = 1.4


def resolve_method(
    method: str,
    target: TargetNetwork,
    options: Mapping[str, Mapping[str, Any]],
    call_cost: CallCost,
    rule: str,
    why_not: Callable[[str], str | None],
) -> tuple[str, str | None]:
    """The method itself, or for `auto`: `small_model+lookup` where a draft model is given, `assd` for an any-subset
    model, `ptp+lookup` or `mtp+lookup` where a drafter or a head is given by the option `ptp.model` or `mtp.model`,
    `mtp+lookup` where the model's checkpoint has heads for multi-token prediction, and they load, `ptp+lookup` where a
    drafter comes with the package and pays on this machine, else `lookup`. Also a line for the user where the drafter
    would not pay.

    `why_not` makes the setup of a method, and returns the reason if that fails. Whether a drafter pays depends on what
    more rows of a call cost; they are timed if `call_cost` has no times yet. Under `reject` the text depends on the
    method, so times decide nothing and the drafter must be given.
    """
    if method != AUTO:
        return method, None
    candidates = auto_candidates(target, options, rule)
    if len(candidates) == 1:
        return candidates[0], None
    if WITH_HEADS in candidates:
        if (reason := why_not(WITH_HEADS)) is None:
            return WITH_HEADS, None
        log.warning("auto drafts without the model's own heads: %s", reason)
    if WITH_DRAFTER not in candidates:
        return "lookup", None
    is_timed = bool(call_cost.seconds)
    if not is_timed:
        _time_calls(target, call_cost)
    ratio = _cost_of_eight_rows(call_cost)
    if not is_timed or ratio > MAX_COST_OF_EIGHT_ROWS:  # other work may have disturbed the measurement, either way
        _time_calls(target, call_cost)
        ratio = _cost_of_eight_rows(call_cost)
    if ratio <= MAX_COST_OF_EIGHT_ROWS:
        return WITH_DRAFTER, None
    return "lookup", (
        f"auto is lookup here: a call of 8 rows takes {ratio:.1f} times as long as one of 1 row, more than the"
        f" {MAX_COST_OF_EIGHT_ROWS} up to which the drafter pays; --method ptp+lookup drafts with it all the same"
    )


def auto_candidates(target: TargetNetwork, options: Mapping[str, Mapping[str, Any]], rule: str) -> list[str]:
    """What `auto` may stand for, the best first: each but the last may turn out not to load, or not to pay."""
    if options.get("small_model", {}).get("model"):
        return [WITH_DRAFT_MODEL]
    if target.any_subset:
        return ["assd"]
    if not target.accepts_drafters:
        return ["lookup"]
    if given := next((name for name in ("ptp", "mtp") if options.get(name, {}).get("model")), None):
        return [f"{given}+lookup"]
    found = [WITH_HEADS] if has_heads(target.model) else []
    if rule != "reject" and find_shipped("drafter", target.model) is not None:
        found.append(WITH_DRAFTER)
    return [*found, "lookup"]


def _time_calls(target: TargetNetwork, call_cost: CallCost) -> None:
    """Keep the least of each time, since noise only adds."""
    known = call_cost.seconds
    known.update({rows: min(seconds, known.get(rows, seconds)) for rows, seconds in call_seconds(target).items()})


def _cost_of_eight_rows(call_cost: CallCost) -> float:
    """As a multiple of a call of one row."""
    return call_cost.seconds_for(8) / call_cost.seconds_for(1)
