"""Propose what the dice will choose: a small drafter is told the uniforms, and says several tokens in one pass."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from saltus.core.auxiliary_groups import SOURCE, Form, in_two_calls, uniforms_of, with_groups
from saltus.core.canvas import Canvas
from saltus.core.decode import Drafter
from saltus.core.forward import Forward, Reply
from saltus.core.listening import Listening
from saltus.core.noise import Noise
from saltus.core.riding import Rider
from saltus.core.rules import Rule, reject
from saltus.core.sampling import Sampling, float_row
from saltus.core.tree import Branch

LEAST = 0.01  # nodes that are reached with a smaller chance are not offered


@dataclass(frozen=True)
class Ptp:
    """Parallel token prediction (PTP, Draxler et al. 2025): tokens that depend on each other, from one pass.

    What `saltus train ptp` made drafts: a small drafter that reads the target's states, in a pass of its own; a gated
    adapter of the target, in the very calls that verify; or such an adapter of a smaller model, a student, which
    reads the text itself. Where a drafter's query has a second opinion, it is offered too.
    """

    model: str = "auto"  # a folder of `saltus train ptp`; auto is the drafter that is shipped for the target
    length: int = 8  # tokens drafted, at most; never more than the model was trained for
    choices: int = 3  # tokens offered for each place, at most
    two_calls: bool = False  # an adapter drafts in a call of its own (PTP, Alg. 1) and not in the one that verifies

    def __post_init__(self) -> None:
        for name in ("length", "choices"):
            if getattr(self, name) < 1:
                raise ValueError(f"ptp: {name} is {getattr(self, name)}, but must be 1 or more")

    @property
    def models(self) -> dict[str, str]:
        if self._is_student:
            return {"ptp": self.model}
        return {"ptp": f"{'adapter' if self._is_adapter else 'drafter'}:{self.model}"}

    @property
    def _is_adapter(self) -> bool:
        return Path(self.model, "adapter_config.json").is_file()

    @property
    def _is_student(self) -> bool:
        return self._is_adapter and "student_of" in self._training

    @cached_property
    def _training(self) -> Mapping[str, Any]:
        """How the model was trained, as its papers say: `form`, and the `window` of its queries."""
        papers = Path(self.model, "saltus.json")
        told = json.loads(papers.read_text(encoding="utf-8")) if papers.is_file() else {}
        return told.get("training", {})

    def drafter(self, noise: Noise, sampling: Sampling, rule: Rule) -> Drafter:
        if not self._is_adapter:
            return StateReader(noise, sampling, rule, self.length, self.choices)
        form: Form = self._training.get("form", "one-hot")
        window = self._training.get("window", self.length + 1)
        if self._is_student:
            return in_two_calls(noise, sampling, rule, form, min(self.length, window), to="ptp")
        length = min(self.length, window - 1)  # the first query drafts nothing
        if self.two_calls or rule is reject:
            return in_two_calls(noise, sampling, rule, form, length)
        return Rider(noise, sampling, form, length)


@dataclass
class StateReader(Listening):
    """Drafts of one text by a network that reads the target's states: queries of uniforms, all in one pass."""

    choices: int

    def offer(self, canvas: Canvas, length: int) -> Generator[Forward, Reply, Sequence[Branch]]:
        stream = f"{SOURCE}/{canvas.done}" if self.rule is reject else "text"  # under `reject` never the rule's own
        uniforms = uniforms_of(self.noise, self.sampling, canvas.open[:length], stream)
        asked = Forward(canvas, to="ptp", hidden=self.unheard())
        reply = yield with_groups(asked, [(-1, uniforms)], self.sampling.temperature)
        return branches(reply.logits[1:], self.choices, reply.columns)


def largest(row: np.ndarray, count: int) -> np.ndarray:
    """Where the largest values stand, the first of equal ones before the others. For few: faster than to sort."""
    left, found = row.copy(), []
    for _ in range(min(count, len(row))):
        found.append(int(left.argmax()))
        left[found[-1]] = -math.inf
    return np.array(found)


def branches(logits: torch.Tensor, choices: int, columns: torch.Tensor | None = None) -> list[Branch]:
    """The likeliest token of every query as a chain, and beside it, at each place, the next likely ones.

    `columns`: the tokens that logits are of. A query knows the uniforms of the tokens before its own but not the
    tokens, so behind another choice the chain goes on as it is.
    """
    ids = None if columns is None else columns.cpu().numpy()
    tokens, odds = [], []
    for row in map(float_row, logits):  # in NumPy: torch would wake threads, which spin beside the kernels' own
        likely = largest(row, choices)
        top = row[likely[0]]
        weight = np.exp(row - top).sum(dtype=np.float64)
        odds.append((np.exp(row[likely] - top) / weight).tolist())
        tokens.append((likely if ids is None else ids[likely]).tolist())
    if not all(map(math.isfinite, (chance for row in odds for chance in row))):  # a broken drafter offers nothing
        return []
    best, likely = [row[0] for row in tokens], [row[0] for row in odds]
    offered, reached = [Branch(best, likely, SOURCE)], 1.0
    for place, (others, chances) in enumerate(zip(tokens, odds, strict=True)):
        for token, chance in zip(others[1:], chances[1:], strict=True):
            if reached * chance < LEAST:
                break
            changed = [*best[:place], token, *best[place + 1 :]], [*likely[:place], chance, *likely[place + 1 :]]
            offered.append(Branch(*changed, SOURCE))
        reached *= likely[place]
    return offered
