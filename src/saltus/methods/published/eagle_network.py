"""What the networks of EAGLE heads have in common: hidden states of the target in, logits of drafted tokens out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.kernels.batch_invariant_ops import BatchInvariantMode
from saltus.methods.published.eagle_model import EagleModel
from saltus.methods.published.gpu_eagle_layers import GPUEagleLayers
from saltus.methods.shared.context_rows import ContextKVCache, unread_states
from saltus.methods.shared.draft_tree import DraftOutputs
from saltus.methods.shared.query_predictions import QueryPredictor, rows_linear
from saltus.methods.shared.timed_outputs import timed_outputs
from saltus.models.cpu.attention import AttentionCall, SequenceRows
from saltus.models.cpu.torch_decoder import normed


@dataclass
class TorchEagleLayers:
    """The layers of a head over rows of several texts, in torch."""

    model: EagleModel

    def new_kv_cache(self) -> ContextKVCache:
        return ContextKVCache()

    def read(
        self, tokens: Sequence[Int[np.ndarray, "_"]], states: Sequence[Float[Tensor, "_rows states"]],
        kv_caches: Sequence[ContextKVCache], starts: Sequence[int],
    ) -> list[Float[Tensor, "_rows hidden"]]:  # fmt: skip
        """The outputs of each text's new rows, from the position `starts` on: tokens beside the target's states."""
        counts, fused = [len(each) for each in tokens], self.model.fused(torch.cat(list(states)))
        ids = torch.from_numpy(np.concatenate(list(tokens)))
        return list(self._rows(ids, fused, kv_caches, starts, counts).split(counts))

    def chains(
        self, last: Float[Tensor, "texts hidden"], queries: Sequence[int], kv_caches: Sequence[ContextKVCache],
        ends: Sequence[int],
    ) -> list[tuple[Float[Tensor, "_queries draft"], Float[Tensor, "_queries hidden"]]]:  # fmt: skip
        """For each text the logits and normalised states of its queries, of one at least, token after likeliest token.

        `last` holds the outputs before the first query, and `ends` the numbers of context positions.
        """
        model, active = self.model, list(range(len(queries)))
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in queries]
        while True:
            normalised = normed(model.norm, last)
            logits = rows_linear(model.lm_head, normalised)
            for place, number in enumerate(active):
                found[number].append((logits[place], normalised[place]))
            kept = [place for place, number in enumerate(active) if len(found[number]) < queries[number]]
            if not kept:
                break
            active = [active[place] for place in kept]
            before = (normalised if model.shape.norm_output else last)[kept]
            starts = [ends[number] + len(found[number]) - 1 for number in active]
            caches = [kv_caches[number] for number in active]
            last = self._rows(model.likeliest(logits[kept]), before, caches, starts, [1] * len(active))
        chains = [[torch.stack(part) for part in zip(*rows, strict=True)] for rows in found]
        return [(logits, states) for logits, states in chains]

    def _rows(
        self,
        tokens: Int[Tensor, "rows"],
        hidden: Float[Tensor, "rows hidden"],
        kv_caches: Sequence[ContextKVCache],
        starts: Sequence[int],
        counts: Sequence[int],
    ) -> Float[Tensor, "rows hidden"]:
        """The layers over new rows of texts, `counts` of them from the position `starts` on."""
        places = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        rows = [
            SequenceRows(cache.kv_cache, start, positions, np.tri(len(positions), dtype=np.uint8))
            for cache, start, positions in zip(kv_caches, starts, places, strict=True)
        ]
        call = AttentionCall(rows, self.model.shape.layers)
        return self.model.rows(tokens, hidden, torch.from_numpy(np.concatenate(places)), call)


@dataclass
class EagleNetwork(ABC):
    """A head as a network; its inputs carry the target's hidden states of the newly decided tokens."""

    model: EagleModel
    target: Any  # the network whose hidden states it reads
    max_unread: ClassVar[int] = 1024  # hidden states that are read at once

    def __post_init__(self) -> None:
        self.device = self.model.tokens.device
        on_gpu = GPUEagleLayers.supports(self.model)
        self.layers = GPUEagleLayers(self.model) if on_gpu else TorchEagleLayers(self.model)
        self.predictor = QueryPredictor(self.model)

    def new_kv_cache(self) -> ContextKVCache:
        return self.layers.new_kv_cache()

    @torch.inference_mode()
    def forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[ContextKVCache]) -> list[ForwardOutputs]:
        """Logits over the drafted tokens of each query; row 0 repeats the first."""
        with BatchInvariantMode() if self.device.type == "cpu" else nullcontext():
            return timed_outputs(lambda: self._forward(batch, kv_caches), self.device)

    def _forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[ContextKVCache]) -> list[ForwardOutputs]:
        layers, draft_tokens = self.model.shape.hidden_state_layers, self.model.tokens
        pairs = zip(batch, kv_caches, strict=True)
        states = [unread_states(inputs, cache, self.target, layers) for inputs, cache in pairs]
        texts, queries = [each.canvas.decided_prefix for each in batch], [len(each.uniforms) for each in batch]
        new = zip(texts, kv_caches, states, strict=True)
        starts = [len(text) - cache.first_position - len(given) for text, cache, given in new]
        rows, num_rows = self._query_rows(texts, states, kv_caches, starts, queries)
        asked = [(logits[:count], hidden[:count]) for count, (logits, hidden) in zip(queries, rows, strict=True)]
        predicted, outputs = self.predictor.of_texts(asked), []
        for text, cache, given, whole, kept, predictions in zip(
            texts, kv_caches, states, rows, asked, predicted, strict=True
        ):
            cache.tokens = text[cache.first_position :].copy()
            logits, hidden = (torch.cat([first[:1], own]) for first, own in zip(whole, kept, strict=True))
            outputs.append(
                DraftOutputs(logits, hidden, 0.0, len(given), num_rows, draft_tokens, predictions=predictions)
            )
        return outputs

    @abstractmethod
    def _query_rows(
        self, texts: Sequence[Int[np.ndarray, "_"]], states: Sequence[Float[Tensor, "_rows states"]],
        kv_caches: Sequence[ContextKVCache], starts: Sequence[int], queries: Sequence[int],
    ) -> tuple[list[tuple[Float[Tensor, "_queries draft"], Float[Tensor, "_queries hidden"]]], int]:  # fmt: skip
        """For each text the logits and normalised states of its queries, of one at least; and all rows of the call.

        `states` are those before the last tokens of `texts`, which stand from the positions `starts` on.
        """
