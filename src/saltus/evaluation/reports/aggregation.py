"""Aggregate records: rates, speed-ups, and their confidence intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Float

from saltus.core.noise import Noise
from saltus.evaluation.benchmarks.graders import main_score
from saltus.evaluation.reports.drafters import aggregate_by_drafter

RESAMPLES = 2000  # of the bootstrap
MIN_TASKS = 10  # of an interval: of five tasks it holds the truth in 83 % of all runs, of ten in 89 %, of forty in 94 %
PLAIN = "plain"
SUMMED_COLUMNS = (
    "texts", "calls", "tokens", "seconds", "prefill_seconds", "later_calls", "later_tokens", "later_seconds", "nodes",
    "score", "scored",
)  # fmt: skip
RATES = {  # numerator and denominator, both sums over texts
    "tokens_per_call": ("tokens", "calls"),
    "tokens_per_second": ("tokens", "seconds"),
    "decode_tokens_per_second": ("later_tokens", "later_seconds"),
    "decode_tokens_per_call": ("later_tokens", "later_calls"),
    "ms_per_call": ("later_seconds", "later_calls"),
    "nodes_per_call": ("nodes", "calls"),
    "accuracy": ("score", "scored"),
}
RATIOS_TO_BASELINE = {"speedup": "tokens_per_second", "decode_speedup": "decode_tokens_per_second"}  # to plain's
PAIRED_RATES = {"speedup_over": "tokens_per_second", "tokens_per_call_over": "tokens_per_call"}  # of every two systems
RATES_OF_CALLS = ("tokens_per_call", "decode_tokens_per_call", "ms_per_call", "nodes_per_call")
RATES_WITH_INTERVALS = (
    "tokens_per_call", "decode_tokens_per_call", "tokens_per_second", "speedup", "decode_speedup", "ms_per_call",
    "accuracy",
)  # fmt: skip
SERVER_NOTE = (
    "Servers were asked to read each prompt anew, by the fields cache_prompt and cache_salt;"
    " one that knows neither may reuse its prefix cache, and then has a shorter prefill."
)

Sums = dict[str, np.ndarray]
"""By column, a sum for each task; [tasks]."""


def aggregate_records(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entry of each system in results.json, computed from records of answers alone; plain comes first."""
    systems = list(dict.fromkeys(record["system"] for record in records))
    tasks = list(dict.fromkeys(record["task"] for record in records))
    of_plain = {text_id(record): record for record in records if record["system"] == PLAIN}
    sums = {system: _sum_by_task([r for r in records if r["system"] == system], tasks) for system in systems}
    category = {record["task"]: record["category"] for record in records}
    groups = {name: np.array([category[task] == name for task in tasks]) for name in dict.fromkeys(category.values())}
    by_system = {}
    for system in systems:
        of_system = [record for record in records if record["system"] == system]
        reported = of_system[0]["calls"] is not None
        scored = next((record for record in of_system if record["score"]), None)
        by_system[system] = {
            "kind": of_system[0]["kind"],
            **_rates_with_intervals(sums[system], sums[PLAIN], reported),
            **{
                entry: {other: _ratio_of_rates(sums[system], sums[other], rate) for other in systems if other != system}
                for entry, rate in PAIRED_RATES.items()
            },
            "acceptance_by_position": _acceptance_by_position(of_system) if reported else None,
            "by_drafter": aggregate_by_drafter(of_system),
            "identical": _count_identical(of_system, of_plain),
            "accuracy_of": scored and scored["accuracy_of"],
            "problems": _list_problems(of_system),
            "by_category": {
                name: _rates_with_intervals(
                    _select_tasks(sums[system], mask), _select_tasks(sums[PLAIN], mask), reported
                )
                | {"identical": _count_identical([r for r in of_system if r["category"] == name], of_plain)}
                for name, mask in groups.items()
            },
        }
    return by_system


def few_tasks_note(num_tasks: int) -> str:
    """What to say of the intervals of so many tasks; empty if they are enough."""
    if num_tasks >= MIN_TASKS:
        return ""
    fault = "there are no intervals" if num_tasks < 2 else "95 % intervals of so few are too narrow"
    return f"Only {num_tasks} task{'s' * (num_tasks != 1)}: {fault}; measure {MIN_TASKS} or more."


def few_tasks_categories(methods: Mapping[str, Any]) -> list[str]:
    """The categories that have intervals of fewer than `MIN_TASKS` tasks."""
    tasks = {name: row["tasks"] for system in methods.values() for name, row in system["by_category"].items()}
    return [name for name, count in tasks.items() if 1 < count < MIN_TASKS]


def text_id(record: Mapping[str, Any]) -> tuple[str, int, int | None]:
    """What the records of a text have in common: its task, turn and seed."""
    return record["task"], record["turn"], record.get("seed")


def _sum_by_task(records: Sequence[Mapping[str, Any]], tasks: Sequence[str]) -> Sums:
    place = {task: index for index, task in enumerate(tasks)}
    sums = {name: np.zeros(len(tasks)) for name in SUMMED_COLUMNS}
    for record in records:
        calls = record["calls"] or ()
        first = calls[0]["decided"] if calls else min(record["new_tokens"], 1)
        score = record["score"] and main_score(record["score"])
        values = {
            "texts": 1,
            "calls": len(calls),
            "tokens": record["new_tokens"],
            "seconds": record["seconds"],
            "prefill_seconds": record["prefill_seconds"],
            "later_calls": max(len(calls) - 1, 0),
            "later_tokens": record["new_tokens"] - first,
            "later_seconds": record["seconds"] - record["prefill_seconds"],
            "nodes": sum(call["nodes"] for call in calls),
            "score": score or 0.0,
            "scored": score is not None,
        }
        for name, value in values.items():
            sums[name][place[record["task"]]] += value
    return sums


def _select_tasks(sums: Sums, mask: np.ndarray) -> Sums:
    return {name: column[mask] for name, column in sums.items()}


def _rates_with_intervals(sums: Sums, plain: Sums, calls_known: bool) -> dict[str, Any]:
    """Rates of a system over some tasks, each with the central 95 % of a bootstrap over tasks, of two at least."""
    num_tasks = int((sums["texts"] > 0).sum())
    weights = _resample_counts(len(sums["texts"]))
    point, spread = _rates(sums, plain, np.ones((1, len(sums["texts"])))), _rates(sums, plain, weights)
    unknown = () if calls_known else RATES_OF_CALLS
    known = {name: None if name in unknown else _finite_or_none(values[0]) for name, values in point.items()}
    return {
        "tasks": num_tasks,
        "texts": int(sums["texts"].sum()),
        "calls": int(sums["calls"].sum()) if calls_known else None,
        "tokens": int(sums["tokens"].sum()),
        "seconds": float(sums["seconds"].sum()),
        "prefill_seconds": float(sums["prefill_seconds"].sum()),
        **known,
        "ci95": {
            name: None if num_tasks < 2 or known[name] is None else _central_95(spread[name])
            for name in RATES_WITH_INTERVALS
        },
    }


def _ratio_of_rates(sums: Sums, other: Sums, rate: str) -> dict[str, Any]:
    """A rate relative to another system's, with the interval of a bootstrap over the tasks of both."""
    over, under = RATES[rate]
    both = (sums["texts"] > 0) & (other["texts"] > 0)

    def ratios(weights: Float[np.ndarray, "resamples tasks"]) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            own, others = ((weights @ each[over]) / (weights @ each[under]) for each in (sums, other))
            return own / others

    ratio = _finite_or_none(ratios(np.ones((1, len(both))))[0])
    uncertain = ratio is not None and both.sum() > 1
    return {"ratio": ratio, "ci95": _central_95(ratios(_resample_counts(len(both)))) if uncertain else None}


def _rates(sums: Sums, plain: Sums, weights: Float[np.ndarray, "resamples tasks"]) -> dict[str, np.ndarray]:
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = {name: (weights @ sums[over]) / (weights @ sums[under]) for name, (over, under) in RATES.items()}
        rates["ms_per_call"] *= 1000
        for name, rate in RATIOS_TO_BASELINE.items():
            over, under = RATES[rate]
            rates[name] = rates[rate] / ((weights @ plain[over]) / (weights @ plain[under]))
    return rates


@lru_cache(maxsize=16)
def _resample_counts(num_tasks: int) -> Float[np.ndarray, "resamples tasks"]:
    """Bootstrap counts of each task: the same for every system, so that ratios compare the same tasks."""
    u = Noise(0).uniforms("bootstrap", np.arange(RESAMPLES * num_tasks)).reshape(RESAMPLES, num_tasks)
    drawn = (u * num_tasks).astype(np.int64)
    counts = np.zeros((RESAMPLES, num_tasks))
    np.add.at(counts, (np.arange(RESAMPLES)[:, None], drawn), 1)
    return counts


def _central_95(values: np.ndarray) -> list[float] | None:
    sound = values[np.isfinite(values)]
    return [float(x) for x in np.quantile(sound, (0.025, 0.975))] if len(sound) else None


def _finite_or_none(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _acceptance_by_position(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Of the calls that verified drafts, the share whose first k draft tokens were all accepted, by k."""
    depths = np.array([c["decided"] - 1 for record in records for c in record["calls"] if c["nodes"]])
    return [float((depths >= k).mean()) for k in range(1, int(depths.max(initial=0)) + 1)]


def _count_identical(records: Sequence[Mapping[str, Any]], plain: Mapping[Any, Mapping[str, Any]]) -> int | None:
    """Texts equal to plain's; None for systems with another random generator."""
    if any(record["other_rng"] for record in records):
        return None
    return sum(_is_same_text(record, plain[text_id(record)]) for record in records)


def _is_same_text(record: Mapping[str, Any], plain: Mapping[str, Any]) -> bool:
    if record["calls"] is None:  # a server gives characters, not tokens
        return "".join(record["pieces"]) == "".join(plain["pieces"])
    return record["tokens"] == plain["tokens"]


def list_skipped(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each record of a skipped task."""
    return [f"{_place(record)}: {record['skipped']}" for record in records]


def _list_problems(records: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{_place(record)}: {problem}" for record in records for problem in record["problems"]]


def _place(record: Mapping[str, Any]) -> str:
    return f"task {record['task']}" + (f", turn {record['turn']}" if record["turn"] else "")
