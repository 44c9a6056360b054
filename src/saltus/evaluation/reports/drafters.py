"""Aggregate records by drafter: what each offered, what of it was accepted, and how true its probabilities are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

DRAFTERS_NOTE = (
    "Tokens a call. One that several drafters offered counts for each; alone: no other offered it."
    " ECE: expected calibration error of the stated probabilities of acceptance."
)
MIN_TOKENS_OF_BIN = 10  # offered tokens, below which a share says nothing


def aggregate_by_drafter(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entry of each drafter of a system, from records of its answers; most accepted tokens first.

    `…_per_call` are for each call of the system. `accepted_alone` counts accepted tokens that no other drafter offered.
    """
    calls = [call for record in records for call in record["calls"] or ()]
    names = sorted({name for call in calls for name in call.get("drafters", ())})
    found = {name: _drafter(name, calls) | _calibration(name, records) for name in names}
    return dict(sorted(found.items(), key=lambda entry: -entry[1]["accepted"]))


def _drafter(name: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    own = [call["drafters"][name] for call in calls if name in call.get("drafters", ())]
    tried = [counts["accepted"] for counts in own if counts["verified"]]
    depths = range(1, max(tried, default=0) + 1)
    accepted, alone = sum(tried), sum(_accepted_alone(name, call.get("drafters", {})) for call in calls)
    offered, verified = _sum_by_depth(own, "offered"), _sum_by_depth(own, "verified")
    return {
        "offered": sum(offered), "verified": sum(verified), "accepted": accepted, "accepted_alone": alone,
        "offered_per_call": sum(offered) / len(calls), "verified_per_call": sum(verified) / len(calls),
        "accepted_per_call": accepted / len(calls), "accepted_alone_per_call": alone / len(calls),
        "accepted_share": accepted / sum(verified) if any(verified) else None,
        "offered_by_depth": offered, "verified_by_depth": verified,
        "accepted_by_depth": [sum(count >= depth for count in tried) for depth in depths],
        "acceptance_by_position": [sum(count >= depth for count in tried) / len(tried) for depth in depths],
    }  # fmt: skip


def _accepted_alone(name: str, drafters: Mapping[str, Any]) -> int:
    others = max((counts["accepted"] for other, counts in drafters.items() if other != name), default=0)
    return max(drafters[name]["accepted"] - others, 0) if name in drafters else 0


def _sum_by_depth(counts: Sequence[Mapping[str, Any]], name: str) -> list[int]:
    return [sum(at_depth) for at_depth in zip_longest(*(each[name] for each in counts), fillvalue=0)]


def _calibration(name: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of the histograms, and ECE = Σ_b (n_b / n) |accepted share_b − mean probability_b| (Guo et al. 2017)."""
    own = [record["acceptance"][name] for record in records if name in record.get("acceptance", ())]
    offered, accepted, stated = (np.sum([each[of] for each in own], axis=0) for of in ("offered", "accepted", "stated"))
    total = np.sum(offered)
    return {
        "calibration": {"offered": offered.tolist(), "accepted": accepted.tolist(), "stated": stated.tolist()},
        "expected_calibration_error": float(np.abs(accepted - stated).sum() / total) if total else None,
    }


def reliability(drafter: Mapping[str, Any]) -> list[tuple[float, float, int]]:
    """Mean stated probability, accepted share and number of tokens of each bin with enough tokens."""
    return [
        (stated / offered, accepted / offered, offered)
        for offered, accepted, stated in zip(*drafter["calibration"].values(), strict=True)
        if offered >= MIN_TOKENS_OF_BIN
    ]


def each_drafter(results: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """System, drafter and entry of all drafters of a run."""
    for system, row in results["methods"].items():
        for name, drafter in row["by_drafter"].items():
            yield system, name, drafter
