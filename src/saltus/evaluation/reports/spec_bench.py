"""Answers in the format of Spec-Bench, so that its own tools can read our runs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any


def spec_bench_answers(
    records: Sequence[Mapping[str, Any]], system: str, model: str | None = None
) -> list[dict[str, Any]]:
    """One object for each task with the fields that Spec-Bench's `evaluation/speed.py` and `equal.py` read.

    `wall_time` is in seconds, prefill included; `accept_lengths` are the tokens that each call decided, empty for
    a system that does not report calls. Turns are stripped, as there. Spec-Bench counts plain decoding's tokens as
    `len(tokenizer(text).input_ids) - 1`, for a tokenizer that adds a token in front. Errors: ValueError of one line.
    """
    tasks: dict[str, dict[Any, dict[int, Mapping[str, Any]]]] = {}  # by seed and turn
    for record in records:
        if record["system"] == system:  # measured again: the last one counts
            tasks.setdefault(record["task"], {}).setdefault(record.get("seed"), {})[record["turn"]] = record
    if not tasks:
        known = ", ".join(dict.fromkeys(record["system"] for record in records)) or "no records at all"
        raise ValueError(f"no record is of system {system}; the run has {known}")
    name = f"{model}-{system}" if model else system
    return [
        _answer(task, [[turns[turn] for turn in sorted(turns)] for turns in by_seed.values()], name)
        for task, by_seed in tasks.items()
    ]


def _answer(task: str, answers: Sequence[Sequence[Mapping[str, Any]]], model: str) -> dict[str, Any]:
    """The answers to a task, each a choice with its turns."""
    return {
        "question_id": int(task) if task.isdecimal() else task,
        "category": answers[0][0]["category"],
        "answer_id": uuid.uuid5(uuid.NAMESPACE_OID, f"{model}/{task}").hex,
        "model_id": model,
        "choices": [
            {
                "index": index,
                "turns": ["".join(turn["pieces"]).strip() for turn in turns],
                "decoding_steps": [None if turn["calls"] is None else len(turn["calls"]) for turn in turns],
                "new_tokens": [turn["new_tokens"] for turn in turns],
                "wall_time": [turn["seconds"] for turn in turns],
                "accept_lengths": [call["decided"] for turn in turns for call in turn["calls"] or ()],
            }
            for index, turns in enumerate(answers)
        ],
        "tstamp": time.time(),
    }
