"""Count the tokens of an answer, and what drafting did for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from saltus.engine.request import CallRecord


def usage(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int,
    predicted: Sequence[CallRecord] | None,
    reasoning_tokens: int | None = None,
) -> dict[str, Any]:
    """Token counts of an answer; with the calls of a predicted one, how many draft tokens these accepted."""
    counts: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    if predicted is not None:
        drafted = speculation_metrics(predicted)
        accepted = drafted["num_accepted_draft_tokens"]
        counts["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted["num_draft_tokens"] - accepted,
        }
    if reasoning_tokens is not None:
        counts.setdefault("completion_tokens_details", {})["reasoning_tokens"] = reasoning_tokens
    return counts


def speculation_metrics(calls: Sequence[CallRecord]) -> dict[str, Any]:
    """What drafting did for a text. A call's length counts the target's own token."""
    drafted = sum(call.num_draft_tokens for call in calls)
    accepted = [len(call.tokens) - call.num_padding_tokens - 1 for call in calls]
    verified = [count for call, count in zip(calls, accepted, strict=True) if call.num_draft_tokens]
    histogram = [0] * (1 + max(accepted, default=0))
    for count in accepted:
        histogram[max(count, 0)] += 1
    return {
        "num_calls": len(calls),
        "num_tokens": sum(len(call.tokens) for call in calls),
        "mean_acceptance_length": 1 + sum(accepted) / len(calls) if calls else 0.0,
        "draft_acceptance_rate": sum(verified) / drafted if drafted else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": len(verified),
        "num_accepted_draft_tokens": sum(verified),
        "num_draft_tokens": drafted,
    }
