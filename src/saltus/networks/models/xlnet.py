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

from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.drafting.pairwise_correction import PairwiseCorrection
from saltus.networks.models.any_subset import required_distributions

QUERIES_PER_PASS = 16  # holes that one reading of the text can be asked for


@dataclass
class _Pass:
    """One way to fill the first holes, and which holes are asked given how many of these."""

    path_tokens: list[int] = field(default_factory=list)  # tokens of the first open holes
    queried_holes: dict[int, int] = field(
        default_factory=dict
    )  # number of the open hole → how many of the path it sees
    outputs: list[tuple[int, int]] = field(default_factory=list)  # which law is for which of the holes asked

    def can_add(self, path: list[int], hole: int) -> bool:
        """Can a hole be asked given this path here, beside what is asked already?

        A position has one set of tokens that it sees, be it as text or as a query: the text before it.
        """
        longer, shorter = (self.path_tokens, path) if len(self.path_tokens) >= len(path) else (path, self.path_tokens)
        if (
            longer[: len(shorter)] != shorter
            or hole in self.queried_holes
            or len(self.queried_holes) == QUERIES_PER_PASS
        ):
            return False
        return all(
            seen == place for place, seen in {**self.queried_holes, hole: len(path)}.items() if place < len(longer)
        )


@dataclass
class XlnetNetwork:
    """An `XLNetLMHeadModel` behind Forward and Reply, for filling holes. It keeps nothing between calls."""

    model: Any
    free_shapes: bool = False
    any_subset = True
    blank_token: int | None = None
    pairwise_correction: PairwiseCorrection | None = None
    fixed_shape_runner: None = field(init=False, default=None)
    native_decoder: None = field(init=False, default=None)
    adapter: None = field(init=False, default=None)
    hidden_state_layers: tuple[int, ...] = ()
    lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.model.eval()

    def new_kv_cache(self) -> object:
        """Nothing; an object of its own for each text."""
        return object()

    def attach_adapter(self, adapter: Any) -> None:
        """Errors: ValueError: adapters are for causal models."""
        if adapter is not None:
            raise ValueError("XLNet is served without adapters; draft with assd")

    def add_hidden_state_layers(self, layers: Sequence[int]) -> None:
        """Errors: ValueError: its states are not given out."""
        raise ValueError("drafters and heads read states of a causal model, which XLNet is not; draft with assd")

    @torch.inference_mode()
    def forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[Any]) -> list[ForwardOutputs]:
        """Evaluate every Forward, text by text."""
        with self.lock:
            return [self._forward(inputs) for inputs in batch]

    def _forward(self, inputs: ForwardInputs) -> ForwardOutputs:
        started = time.perf_counter()
        found, rows = required_distributions(inputs)
        readings: list[_Pass] = []
        for number, (node, hole) in enumerate(found):
            path = inputs.path_tokens(node)
            reading = next((one for one in readings if one.can_add(path, hole)), None)
            if reading is None:
                readings.append(reading := _Pass())
            reading.path_tokens = max(reading.path_tokens, path, key=len)
            reading.queried_holes[hole] = len(path)
            reading.outputs.append((number, hole))
        logits: list[Any] = [None] * len(found)
        for reading in readings:
            for (number, _), row in zip(reading.outputs, self._run_pass(inputs, reading), strict=False):
                logits[number] = row
        seconds = time.perf_counter() - started
        return ForwardOutputs(
            torch.stack([logits[row] for row in rows]),
            None,
            seconds,
            1,
            len(found),
            drafter_data=self.pairwise_correction,
        )

    def _run_pass(self, inputs: ForwardInputs, one_pass: _Pass) -> torch.Tensor:
        """Logits of the holes asked in one reading, then of as many as are spare."""
        canvas, device = inputs.canvas, self.model.device
        text, open_, length = canvas.tokens.clip(0), canvas.open_positions, len(canvas.tokens)
        hidden = np.ones((length, length), dtype=np.float32)  # [i, j]: may i not see j?
        known = canvas.known_positions
        rank = np.full(length, length)
        rank[known] = np.maximum(
            np.arange(len(known)) - len(canvas.given_positions) + 1, 0
        )  # what was given sees all of itself
        hidden[np.ix_(known, known)] = rank[known][:, None] < rank[known][None]
        for depth, token in enumerate(one_pass.path_tokens):
            text[open_[depth]] = token
        for hole in {*range(len(one_pass.path_tokens)), *one_pass.queried_holes}:
            seen = [*known, *open_[: one_pass.queried_holes.get(hole, hole)]]
            hidden[open_[hole], seen] = 0
        mapping = np.zeros((QUERIES_PER_PASS, length), dtype=np.float32)
        for row, hole in enumerate(one_pass.queried_holes):
            mapping[row, open_[hole]] = 1
        dtype = self.model.dtype
        return self.model(
            input_ids=torch.from_numpy(text)[None].to(device),
            perm_mask=torch.from_numpy(hidden)[None].to(device, dtype),
            target_mapping=torch.from_numpy(mapping)[None].to(device, dtype),
            use_mems=False,
        ).logits[0]
