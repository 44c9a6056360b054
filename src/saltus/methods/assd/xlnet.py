"""Evaluate trees on XLNet (Yang et al. 2019) by Transformers' own two streams, without a KV cache.

Each pass reads the whole text. Branches, and queries after several nodes, can need several passes in a call. Queried
positions and filled holes differ between calls, but shapes do not: the length is that of the text, texts run one by
one, and each pass queries QUERIES_PER_PASS holes. So a distribution has the same bits in every call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.methods.assd.hole_predictions import AnySubsetOutputs
from saltus.methods.assd.network import required_distributions
from saltus.methods.shared.logit_correction import PairwiseCorrection

QUERIES_PER_PASS = 16  # holes queried in one pass over the text


@dataclass
class _Pass:
    """Tokens for the first open holes, and the holes that are queried given some of them."""

    path_tokens: list[int] = field(default_factory=list)  # tokens of the first open holes
    # number of the open hole → how many tokens of the path it attends to
    queried_holes: dict[int, int] = field(default_factory=dict)
    outputs: list[tuple[int, int]] = field(default_factory=list)  # (index of the distribution, queried hole)

    def can_add(self, path: list[int], hole: int) -> bool:
        """True if a hole can be queried given this path in this pass, beside the holes already queried.

        A position attends to one set of tokens, as text and as a query: the text before it.
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
    """An `XLNetLMHeadModel` as a target network for filling holes. It keeps nothing between calls."""

    model: Any
    batch_invariant: bool = True
    any_subset = True
    reads_whole_text = True  # in every call, though it reports one token read
    accepts_drafters = False
    blank_token: int | None = None
    pairwise_correction: PairwiseCorrection | None = None
    lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        # Transformers' two streams encode positions in float32 and need such weights, whatever a checkpoint's dtype is.
        self.model.float().eval()

    @property
    def compute_path(self) -> Literal["transformers"]:
        """See TargetNetwork."""
        return "transformers"

    @property
    def max_draft_tokens(self) -> None:
        """See TargetNetwork."""

    def new_kv_cache(self) -> object:
        """An empty object for each text."""
        return object()

    @torch.inference_mode()
    def forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[Any]) -> list[ForwardOutputs]:
        """Evaluate texts one after the other; `context_tokens_read` is nominally 1."""
        with self.lock:
            return [self._forward(inputs) for inputs in batch]

    def _forward(self, inputs: ForwardInputs) -> ForwardOutputs:
        started = time.perf_counter()
        required, rows = required_distributions(inputs)
        passes: list[_Pass] = []
        for number, (node, hole) in enumerate(required):
            path = inputs.path_tokens(node)
            one_pass = next((each for each in passes if each.can_add(path, hole)), None)
            if one_pass is None:
                passes.append(one_pass := _Pass())
            one_pass.path_tokens = max(one_pass.path_tokens, path, key=len)
            one_pass.queried_holes[hole] = len(path)
            one_pass.outputs.append((number, hole))
        logits: list[Any] = [None] * len(required)
        for one_pass in passes:
            for (number, _), row in zip(one_pass.outputs, self._run_pass(inputs, one_pass), strict=False):
                logits[number] = row
        seconds = time.perf_counter() - started
        return AnySubsetOutputs(
            torch.stack([logits[row] for row in rows]),
            None,
            seconds,
            1,
            len(required),
            correction=self.pairwise_correction,
        )

    def _run_pass(self, inputs: ForwardInputs, one_pass: _Pass) -> torch.Tensor:
        """Logits of the holes queried in one pass, then of padding."""
        canvas, device = inputs.canvas, self.model.device
        text, open_positions, length = canvas.tokens.clip(0), canvas.open_positions, len(canvas.tokens)
        hidden = np.ones((length, length), dtype=np.float32)  # [i, j]: 1 if i must not attend to j
        known = canvas.known_positions
        rank = np.full(length, length)
        # given tokens attend to each other in both directions
        rank[known] = np.maximum(np.arange(len(known)) - len(canvas.given_positions) + 1, 0)
        hidden[np.ix_(known, known)] = rank[known][:, None] < rank[known][None]
        for depth, token in enumerate(one_pass.path_tokens):
            text[open_positions[depth]] = token
        for hole in {*range(len(one_pass.path_tokens)), *one_pass.queried_holes}:
            seen = [*known, *open_positions[: one_pass.queried_holes.get(hole, hole)]]
            hidden[open_positions[hole], seen] = 0
        mapping = np.zeros((QUERIES_PER_PASS, length), dtype=np.float32)
        for row, hole in enumerate(one_pass.queried_holes):
            mapping[row, open_positions[hole]] = 1
        dtype = self.model.dtype
        return self.model(
            input_ids=torch.from_numpy(text)[None].to(device),
            perm_mask=torch.from_numpy(hidden)[None].to(device, dtype),
            target_mapping=torch.from_numpy(mapping)[None].to(device, dtype),
            use_mems=False,
        ).logits[0]
