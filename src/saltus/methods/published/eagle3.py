"""Draft token by token with layers that read the target's hidden states and their own (EAGLE-3, Li et al. 2025).

A row holds the embedding of a token and the state before it: of a decided token the fused hidden states of some target
layers, of a draft token the layers' own output at the row before. The drafts of a call are the likeliest chain. EAGLE
3.1 also normalises the states that are fused, and the output that the next row reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.methods.published.eagle_model import load_eagle
from saltus.methods.published.eagle_network import EagleNetwork, causal_call
from saltus.methods.shared.context_layers import ContextKVCache, unread_states
from saltus.methods.shared.draft_tree import DraftOutputs
from saltus.methods.shared.query_predictions import rows_linear
from saltus.models.cpu.torch_decoder import normed
from saltus.models.protocols import TargetNetwork

ARCHITECTURES = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"}


def recognises(config: Mapping[str, Any]) -> bool:
    """True for the config.json of a published EAGLE-3 head."""
    if kind := config.get("speculators_model_type"):
        return kind == "eagle3"
    return bool(ARCHITECTURES & set(config.get("architectures") or ()))


def load_network(folder: Path, target: TargetNetwork, target_name: str) -> Eagle3Network:
    """The head for this target. Errors: ValueError of one line."""
    model, _ = load_eagle(folder, target.model, target_name, "an EAGLE-3 head", {})
    return Eagle3Network(model, target)


class Eagle3Network(EagleNetwork):
    """Logits of each query given the likeliest tokens before it; queries cost a pass of one row each."""

    def _run(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[ContextKVCache]) -> list[ForwardOutputs]:
        layers, pairs = self.model.shape.hidden_state_layers, list(zip(batch, kv_caches, strict=True))
        states = [unread_states(inputs, kv_cache, self.target, layers) for inputs, kv_cache in pairs]
        counts = [len(each) for each in states]
        decided = [inputs.canvas.decided_prefix for inputs in batch]
        ends = [len(text) - cache.first_position for text, cache in zip(decided, kv_caches, strict=True)]
        tokens = np.concatenate([text[-count:] for text, count in zip(decided, counts, strict=True)])
        fused = self.model.fused(torch.cat(states))
        starts = [end - count for end, count in zip(ends, counts, strict=True)]
        hidden = self._rows(torch.from_numpy(tokens), fused, kv_caches, starts, counts)
        last = hidden[torch.tensor(counts).cumsum(0).to(self.device) - 1]
        drafts = self._chains(last, [len(inputs.uniforms) for inputs in batch], kv_caches, ends)
        outputs, num_rows = [], sum(counts) + sum(max(len(inputs.uniforms) - 1, 0) for inputs in batch)
        for inputs, cache, count, rows in zip(batch, kv_caches, counts, drafts, strict=True):
            cache.tokens = inputs.canvas.decided_prefix[cache.first_position :].copy()
            kept = [rows[0], *rows[: len(inputs.uniforms)]]
            logits, states_of_rows = (torch.stack(part) for part in zip(*kept, strict=True))
            predictions = self.predictor(logits[1:], states_of_rows[1:])
            outputs.append(
                DraftOutputs(logits, states_of_rows, 0.0, count, num_rows, self.model.tokens, predictions=predictions)
            )  # fmt: skip
        return outputs

    def _chains(
        self, last: Tensor, queries: Sequence[int], kv_caches: Sequence[ContextKVCache], ends: Sequence[int]
    ) -> list[list[tuple[Tensor, Tensor]]]:
        """For each text the logits and normalised states of its queries, of one at least.

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
                return found
            active = [active[place] for place in kept]
            tokens = model.tokens[logits[kept].float().nan_to_num().argmax(-1)]
            before = (normalised if model.shape.norm_output else last)[kept]
            starts = [ends[number] + len(found[number]) - 1 for number in active]
            last = self._rows(tokens, before, [kv_caches[number] for number in active], starts, [1] * len(active))

    def _rows(
        self,
        tokens: Int[Tensor, "rows"],
        hidden: Float[Tensor, "rows hidden"],
        kv_caches: Sequence[ContextKVCache],
        starts: Sequence[int],
        counts: Sequence[int],
    ) -> Float[Tensor, "rows hidden"]:
        """The layers over new rows of texts, `counts` of them from the position `starts` on."""
        positions, call = causal_call(kv_caches, starts, counts, self.model.shape.layers)
        return self.model.rows(tokens, hidden, positions, call)
