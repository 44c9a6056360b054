"""The request that gives both sides of a task's hole to a model that fills holes anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from saltus.engine.engine import Engine
from saltus.engine.infill_template import InfillTemplate
from saltus.evaluation.benchmarks.suites import Task
from saltus.evaluation.benchmarks.systems_under_test import BenchmarkRequest
from saltus.networks.protocols import FillsHoles

MARGIN = 2  # tokens that begin and end a text


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
    before, after = task.raw.splitlines(keepends=True), task.suffix.splitlines(keepends=True)
    if context is not None:
        size = size if length is not None else min(size, context // 2)
        room = context - size - MARGIN
        right = sum(_num_tokens(tokenizer, line) for line in after)
        before = _nearest(tokenizer, before[::-1], max(room - right, room * 2 // 3))[::-1]
        after = _nearest(tokenizer, after, room - sum(_num_tokens(tokenizer, line) for line in before))
    template = InfillTemplate(("".join(before), "".join(after)), (length,))
    canvas = engine.infill_request(template, open_tokens=size, verbatim=True).request.canvas
    assert canvas is not None
    given = tuple(canvas.tokens[canvas.given_positions].tolist())
    settings = {**settings, "max_new_tokens": size, "ignore_eos": False}
    return BenchmarkRequest(task.raw, given, True, template=template, hole_end=network.blank_token, **settings)


def _nearest(tokenizer: Any, lines: Sequence[str], room: int) -> list[str]:
    """The first lines that have `room` tokens together, at most."""
    kept: list[str] = []
    for line in lines:
        room -= _num_tokens(tokenizer, line)
        if room < 0:
            break
        kept.append(line)
    return kept


def _num_tokens(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False).input_ids)
