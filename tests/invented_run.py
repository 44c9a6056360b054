"""Invent a benchmark run: records and results as `saltus bench` writes them, of texts that no model wrote."""

import random
from statistics import fmean
from typing import Any

from saltus.evaluation.reports.aggregation import PAIRED_RATES
from saltus.evaluation.reports.drafters import aggregate_by_drafter

WORDS = (
    "the",
    "network",
    "reads",
    "its",
    "text",
    "and",
    "leaps",
    "over",
    "what",
    "it",
    "knows",
    "so",
    "one",
    "call",
    "decides",
)
CATEGORIES = ("writing", "qa", "rag", "coding")
HISTOGRAM = {"offered": [8] * 10, "accepted": [*range(8), 7, 8], "stated": [0.8 * bin_ + 0.4 for bin_ in range(10)]}
SYSTEMS = {"plain": 0.0, "lookup": 0.45, "jacobi": 0.2, "jacobi+lookup": 0.5, "transformers": None, "endpoint:b": None}


def invented_records(
    tasks: int = 8, categories: tuple[str, ...] = CATEGORIES, systems: dict[str, float | None] | None = None
) -> list[dict[str, Any]]:
    """Sides map to the chance that a drafted token is accepted; None: a baseline that does not tell its calls."""
    records = []
    for task in range(tasks):
        dice = random.Random(task)
        words = [" " + dice.choice(WORDS) for _ in range(40 + task % 5)]
        for system, chance in (systems or SYSTEMS).items():
            records.append(_record(task, categories[task % len(categories)], system, chance, words))
    return records


def _record(task: int, category: str, system: str, chance: float | None, words: list[str]) -> dict[str, Any]:
    dice = random.Random(f"{task} {system}")
    calls: list[dict[str, Any]] = []
    pieces, at = [], 0
    while at < len(words):
        decided = 1
        while chance and decided < 6 and dice.random() < chance:
            decided += 1
        run = words[at : at + decided]
        nodes = 8 if chance and calls else 0
        seconds = 0.018 + 0.0006 * nodes + 0.002 * dice.random() + (0 if calls else 0.05)
        drafted = {"offered": [2] * 8, "verified": [1] * 8, "accepted": len(run) - 1}
        calls.append(
            {
                "decided": len(run), "nodes": nodes, "seconds": seconds, "read": 1 if calls else 30,
                "drafters": dict.fromkeys(system.split("+"), drafted) if nodes else {},
            }
        )  # fmt: skip
        pieces.append("".join(run))
        at += len(run)
    told = chance is not None
    return {
        "task": str(task + 80), "category": category, "turn": 0, "system": system, "prompt_tokens": 30,
        "tokens": list(range(len(words))), "new_tokens": len(words), "finish_reason": "length",
        "pieces": pieces if told else ["".join(pieces)],
        "seconds": sum(call["seconds"] for call in calls) * (1.02 if told else 1.2),
        "prefill_seconds": calls[0]["seconds"], "calls": calls if told else None, "draft_calls": 0, "problems": [],
        "acceptance": {name: HISTOGRAM for call in calls for name in call["drafters"]} if told else {},
        "score": {"correct": dice.random() < 0.4} if category == "qa" else None,
    }  # fmt: skip


def results_of(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the records, with intervals from resampling the texts; simpler than the real ones, and alike."""
    methods = {}
    for system in dict.fromkeys(record["system"] for record in records):
        own, plain = [[r for r in records if r["system"] == name] for name in (system, "plain")]
        methods[system] = _summary(own, plain) | {
            "kind": "baseline" if ":" in system or system.startswith("transformers") else "method", "accuracy_of": None,
            "acceptance_by_position": _acceptance(own), "by_drafter": aggregate_by_drafter(own),
            "problems": [p for r in own for p in r["problems"]],
        }  # fmt: skip
        methods[system]["by_category"] = {
            category: _summary(
                [r for r in own if r["category"] == category], [r for r in plain if r["category"] == category]
            )
            for category in dict.fromkeys(r["category"] for r in own)
        }
    for name, one in methods.items():
        for entry, rate in PAIRED_RATES.items():
            ratios = {
                other: one[rate] / row[rate] if one[rate] and row[rate] else None
                for other, row in methods.items()
                if other != name
            }
            one[entry] = {
                other: {"ratio": ratio, "ci95": [0.9 * ratio, 1.1 * ratio] if ratio else None}
                for other, ratio in ratios.items()
            }
    tasks = len({record["task"] for record in records})
    return {
        "command": "saltus bench spec-bench --quick --methods lookup,jacobi", "date": "2026-05-04T12:30:00+00:00",
        "commit": "abc1234",
        "machine": {
            "processor": "AMD EPYC 9B14", "cores": 2, "memory_gb": 23.4, "gpu": None, "system": "Linux 6.1",
            "python": "3.11.9", "torch": "2.13.0", "transformers": "5.16.0", "saltus": "0.1.0",
        },
        "model": {"name": "smollm2-135m", "dtype": "bfloat16", "weights": "bfloat16", "parameters": 134515008},
        "suite": {"name": "spec-bench", "tasks": tasks, "turns": tasks},
        "settings": {"max_new_tokens": 64, "temperature": 0.0, "seed": 0, "coupling": "gumbel"}, "methods": methods,
    }  # fmt: skip


def _measures(own: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, float | None]:
    told = own[0]["calls"] is not None
    tokens, seconds = sum(len(r["tokens"]) for r in own), sum(r["seconds"] for r in own)
    prefill = sum(r["prefill_seconds"] for r in own)
    plain_seconds = sum(r["seconds"] for r in plain)
    plain_speed = sum(len(r["tokens"]) for r in plain) / plain_seconds
    plain_decode = sum(len(r["tokens"]) - 1 for r in plain) / (plain_seconds - sum(r["prefill_seconds"] for r in plain))
    calls = sum(len(r["calls"]) for r in own) if told else 0
    return {
        "tokens_per_call": tokens / calls if told else None, "tokens_per_second": tokens / seconds,
        "decode_tokens_per_second": (tokens - len(own)) / (seconds - prefill),
        "speedup": tokens / seconds / plain_speed,
        "decode_speedup": (tokens - len(own)) / (seconds - prefill) / plain_decode,
        "decode_tokens_per_call": (tokens - len(own)) / max(calls - len(own), 1) if told else None,
        "ms_per_call": 1000 * (seconds - prefill) / max(calls - len(own), 1) if told else None,
        "nodes_per_call": sum(c["nodes"] for r in own for c in r["calls"]) / calls if told else None,
    }  # fmt: skip


def _summary(own: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    dice, draws = random.Random(0), []
    pairs = list(zip(own, plain, strict=True))
    for _ in range(60):
        drawn = dice.choices(pairs, k=len(pairs))
        draws.append(_measures([pair[0] for pair in drawn], [pair[1] for pair in drawn]))
    whole = _measures(own, plain)
    graded = [r["score"]["correct"] for r in own if r["score"]]
    return whole | {
        "tasks": len({r["task"] for r in own}), "texts": len(own),
        "calls": sum(len(r["calls"]) for r in own) if own[0]["calls"] is not None else None,
        "tokens": sum(len(r["tokens"]) for r in own), "seconds": sum(r["seconds"] for r in own),
        "prefill_seconds": sum(r["prefill_seconds"] for r in own),
        "identical": sum("".join(a["pieces"]) == "".join(b["pieces"]) for a, b in pairs),
        "accuracy": fmean(graded) if graded else None,
        "ci95": {name: _interval([draw[name] for draw in draws]) for name in whole} | {"accuracy": None},
    }  # fmt: skip


def _interval(values: list[Any]) -> list[float] | None:
    if values[0] is None:
        return None
    values = sorted(values)
    return [values[1], values[-2]]


def _acceptance(own: list[dict[str, Any]]) -> list[float] | None:
    if own[0]["calls"] is None:
        return None
    drafted = [call["decided"] - 1 for r in own for call in r["calls"] if call["nodes"]]
    return [sum(d >= k for d in drafted) / len(drafted) for k in range(1, max(drafted) + 1)] if drafted else []
