"""What the networks of EAGLE heads have in common: hidden states of the target in, logits of drafted tokens out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.kernels.batch_invariant_ops import BatchInvariantMode
from saltus.methods.published.eagle_model import EagleModel
from saltus.methods.shared.context_layers import ContextKVCache
from saltus.methods.shared.query_predictions import QueryPredictor
from saltus.methods.shared.timed_outputs import timed_outputs
from saltus.models.cpu.attention import AttentionCall, SequenceRows


@dataclass
class EagleNetwork(ABC):
    """A head as a network; its inputs carry the target's hidden states of the newly decided tokens."""

    model: EagleModel
    target: Any  # the network whose hidden states it reads
    max_unread: ClassVar[int] = 1024  # hidden states that are read at once

    def __post_init__(self) -> None:
        self.device = self.model.tokens.device
        self.predictor = QueryPredictor(self.model)

    def new_kv_cache(self) -> ContextKVCache:
        return ContextKVCache()

    @torch.inference_mode()
    def forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[ContextKVCache]) -> list[ForwardOutputs]:
        """Logits over the drafted tokens of each query; row 0 repeats the first."""
        with BatchInvariantMode() if self.device.type == "cpu" else nullcontext():
            return timed_outputs(lambda: self._run(batch, kv_caches), self.device)

    @abstractmethod
    def _run(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[ContextKVCache]) -> list[ForwardOutputs]: ...


def causal_call(
    kv_caches: Sequence[ContextKVCache], starts: Sequence[int], counts: Sequence[int], layers: int
) -> tuple[Int[Tensor, "rows"], AttentionCall]:
    """Positions and attention of new rows, `counts` of each text from the position `starts` on, in their order."""
    places = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    rows = [
        SequenceRows(cache.kv_cache, start, positions, np.tri(len(positions), dtype=np.uint8))
        for cache, start, positions in zip(kv_caches, starts, places, strict=True)
    ]
    return torch.from_numpy(np.concatenate(places)), AttentionCall(rows, layers)
