"""Evaluate trees on XLNet (Yang et al. 2019): two streams of Transformers' own, without a memory.

Each reading is of the whole text; branches, and groups behind several places, need more than one in a call. The places
that are queried, and what stands in holes, differ from call to call, but shapes do not: the length is the text's, one
text is read at a time, and QUERIES holes are asked for in each; so a law has the same bits whatever else is asked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from saltus.core.forward import Forward, Reply
from saltus.core.links import Links
from saltus.networks.any_subset import wanted

QUERIES = 16  # holes that one reading of the text can be asked for


@dataclass
class _Reading:
    """One way to fill the first holes, and which holes are asked given how many of these."""

    path: list[int] = field(default_factory=list)  # tokens of the first open holes
    asked: dict[int, int] = field(default_factory=dict)  # number of the open hole → how many of the path it sees
    rows: list[tuple[int, int]] = field(default_factory=list)  # which law is for which of the holes asked

    def takes(self, path: list[int], hole: int) -> bool:
        """Can a hole be asked given this path here, beside what is asked already?

        A position has one set of tokens that it sees, be it as text or as a query: the text before it.
        """
        longer, shorter = (self.path, path) if len(self.path) >= len(path) else (path, self.path)
        if longer[: len(shorter)] != shorter or hole in self.asked or len(self.asked) == QUERIES:
            return False
        return all(seen == place for place, seen in {**self.asked, hole: len(path)}.items() if place < len(longer))


@dataclass
class XlnetNetwork:
    """An `XLNetLMHeadModel` behind Forward and Reply, for filling holes. It keeps nothing between calls."""

    model: Any
    free: bool = False
    any_subset = True
    blank: int | None = None
    links: Links | None = None
    fixed: None = field(init=False, default=None)
    lean: None = field(init=False, default=None)
    adapter: None = field(init=False, default=None)
    taps: tuple[int, ...] = ()
    busy: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.model.eval()

    def memory(self) -> object:
        """Nothing; an object of its own for each text."""
        return object()

    def attach(self, adapter: Any) -> None:
        """Errors: ValueError: adapters are for causal models."""
        if adapter is not None:
            raise ValueError("XLNet is served without adapters; draft with assd")

    def tap(self, taps: Sequence[int]) -> None:
        """Errors: ValueError: its states are not given out."""
        raise ValueError("drafters and heads read states of a causal model, which XLNet is not; draft with assd")

    @torch.inference_mode()
    def forward(self, asks: Sequence[Forward], memories: Sequence[Any]) -> list[Reply]:
        """Evaluate every Forward, text by text."""
        with self.busy:
            return [self._forward(ask) for ask in asks]

    def _forward(self, ask: Forward) -> Reply:
        started = time.perf_counter()
        found, rows = wanted(ask)
        readings: list[_Reading] = []
        for number, (node, hole) in enumerate(found):
            path = ask.path(node)
            reading = next((one for one in readings if one.takes(path, hole)), None)
            if reading is None:
                readings.append(reading := _Reading())
            reading.path = max(reading.path, path, key=len)
            reading.asked[hole] = len(path)
            reading.rows.append((number, hole))
        logits: list[Any] = [None] * len(found)
        for reading in readings:
            for (number, _), row in zip(reading.rows, self._read(ask, reading), strict=False):
                logits[number] = row
        seconds = time.perf_counter() - started
        return Reply(torch.stack([logits[row] for row in rows]), None, seconds, 1, len(found), links=self.links)

    def _read(self, ask: Forward, reading: _Reading) -> torch.Tensor:
        """Logits of the holes asked in one reading, then of as many as are spare."""
        canvas, device = ask.canvas, self.model.device
        text, open_, length = canvas.tokens.clip(0), canvas.open, len(canvas.tokens)
        hidden = np.ones((length, length), dtype=np.float32)  # [i, j]: may i not see j?
        known = canvas.known
        rank = np.full(length, length)
        rank[known] = np.maximum(np.arange(len(known)) - len(canvas.given) + 1, 0)  # what was given sees all of itself
        hidden[np.ix_(known, known)] = rank[known][:, None] < rank[known][None]
        for depth, token in enumerate(reading.path):
            text[open_[depth]] = token
        for hole in {*range(len(reading.path)), *reading.asked}:
            seen = [*known, *open_[: reading.asked.get(hole, hole)]]
            hidden[open_[hole], seen] = 0
        mapping = np.zeros((QUERIES, length), dtype=np.float32)
        for row, hole in enumerate(reading.asked):
            mapping[row, open_[hole]] = 1
        dtype = self.model.dtype
        return self.model(
            input_ids=torch.from_numpy(text)[None].to(device),
            perm_mask=torch.from_numpy(hidden)[None].to(device, dtype),
            target_mapping=torch.from_numpy(mapping)[None].to(device, dtype),
            use_mems=False,
        ).logits[0]
