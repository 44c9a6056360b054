"""The request that gives both sides of a task's hole to a model that reads them: any-subset, or in the middle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from saltus.engine.engine import Engine
from saltus.engine.fim import fim_prompt
from saltus.engine.fim_formats import find_fim_format
from saltus.engine.infill_template import InfillTemplate
from saltus.evaluation.benchmarks.suites import Task
from saltus.evaluation.benchmarks.systems_under_test import BenchmarkRequest
from saltus.models.protocols import FillsHoles

MARGIN = 2  # tokens that begin and end a text
FIM_MARGIN = 8  # tokens around the two sides, and those that a side may have more than its lines


def reads_both_sides(engine: Engine, task: Task, left_only: bool = False) -> bool:
    """True if the task has a hole that the model can fill; with `left_only` a causal model continues the left side."""
    if task.suffix is None:
        return False
    return engine.network.any_subset or (not left_only and find_fim_format(engine.tokenizer) is not None)


def hole_request(engine: Engine, task: Task, settings: dict[str, Any]) -> BenchmarkRequest:
    """The request of a task with a hole, for a model that `reads_both_sides`. Errors: ValueError of one line."""
    return (infill_request if engine.network.any_subset else fim_request)(engine, task, settings)


def fim_request(engine: Engine, task: Task, settings: dict[str, Any]) -> BenchmarkRequest:
    """A causal model's fill-in-the-middle prompt, of a long text the lines nearest to the hole."""
    assert task.raw is not None and task.suffix is not None
    context = engine.target.context_length
    if context is not None:
        settings = {**settings, "max_new_tokens": min(settings["max_new_tokens"], context // 2)}
    before, after = _nearest_sides(engine, task, settings["max_new_tokens"] + FIM_MARGIN)
    prompt = fim_prompt(engine.tokenizer, engine.target.name, before, after)
    return BenchmarkRequest(
        before, tuple(prompt.tokens), True, task.stop, suffix=after, end_tokens=prompt.end_tokens, **settings
    )


def infill_request(engine: Engine, task: Task, settings: dict[str, Any]) -> BenchmarkRequest:
    """Of a long text the lines nearest to the hole that the model can read, two thirds of them before it.

    The model ends the hole, after `max_new_tokens` at most; one that cannot gets a hole of the reference's length.
    Errors: ValueError of one line.
    """
    network = engine.network
    assert isinstance(network, FillsHoles) and task.raw is not None and task.suffix is not None
    tokenizer, context = engine.tokenizer, engine.target.context_length
    length = None if network.blank_token is not None else max(_num_tokens(tokenizer, task.hole), 1)
    size = settings["max_new_tokens"] if length is None else length
    if context is not None and length is None:
        size = min(size, context // 2)
    template = InfillTemplate(_nearest_sides(engine, task, size + MARGIN), (length,))
    canvas = engine.infill_request(template, open_tokens=size, verbatim=True).request.canvas
    assert canvas is not None
    given = tuple(canvas.tokens[canvas.given_positions].tolist())
    settings = {**settings, "max_new_tokens": size, "ignore_eos": False}
    return BenchmarkRequest(task.raw, given, True, template=template, hole_end=network.blank_token, **settings)


def _nearest_sides(engine: Engine, task: Task, reserved: int) -> tuple[str, str]:
    """What the model reads before and after the hole, beside `reserved` tokens: the nearest lines."""
    assert task.raw is not None and task.suffix is not None
    tokenizer, context = engine.tokenizer, engine.target.context_length
    if context is None:
        return task.raw, task.suffix
    before, after = task.raw.splitlines(keepends=True), task.suffix.splitlines(keepends=True)
    available_tokens = context - reserved
    right = sum(_num_tokens(tokenizer, line) for line in after)
    before = _nearest(tokenizer, before[::-1], max(available_tokens - right, available_tokens * 2 // 3))[::-1]
    after = _nearest(tokenizer, after, available_tokens - sum(_num_tokens(tokenizer, line) for line in before))
    return "".join(before), "".join(after)


def _nearest(tokenizer: Any, lines: Sequence[str], max_tokens: int) -> list[str]:
    """The first lines that have `max_tokens` tokens together, at most."""
    kept: list[str] = []
    for line in lines:
        max_tokens -= _num_tokens(tokenizer, line)
        if max_tokens < 0:
            break
        kept.append(line)
    return kept


def _num_tokens(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False).input_ids)
