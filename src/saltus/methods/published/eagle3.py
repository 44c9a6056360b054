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
from torch import Tensor

from saltus.methods.published.eagle_model import load_eagle
from saltus.methods.published.eagle_network import EagleNetwork
from saltus.methods.shared.context_rows import ContextKVCache
from saltus.models.protocols import TargetNetwork

ARCHITECTURES = {
    "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel",
    "Eagle3Qwen3ForCausalLM", "Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM", "Eagle3MiniMaxM2ForCausalLM",
}  # fmt: skip
AUTHORS = "LlamaForCausalLM"  # in the authors' folders, beside the size of the drafted vocabulary


def recognises(config: Mapping[str, Any]) -> bool:
    """True for the config.json of a published EAGLE-3 head."""
    if kind := config.get("speculators_model_type"):
        return kind == "eagle3"
    named = set(config.get("architectures") or ())
    return bool(ARCHITECTURES & named) or (AUTHORS in named and "draft_vocab_size" in config)


def load_network(folder: Path, target: TargetNetwork, target_name: str) -> Eagle3Network:
    """The head for this target. Errors: ValueError of one line."""
    model, _ = load_eagle(folder, target.model, target_name, "an EAGLE-3 head", {})
    return Eagle3Network(model, target)


class Eagle3Network(EagleNetwork):
    """Logits of each query given the likeliest tokens before it; queries cost a pass of one row each."""

    def _query_rows(
        self, texts: Sequence[np.ndarray], states: Sequence[Tensor], kv_caches: Sequence[ContextKVCache],
        starts: Sequence[int], queries: Sequence[int],
    ) -> tuple[list[tuple[Tensor, Tensor]], int]:  # fmt: skip
        counts = [len(each) for each in states]
        tokens = [text[-count:] for text, count in zip(texts, counts, strict=True)]
        last = torch.stack([rows[-1] for rows in self.layers.read(tokens, states, kv_caches, starts)])
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        num_rows = sum(counts) + sum(max(count - 1, 0) for count in queries)
        return self.layers.chains(last, queries, kv_caches, ends), num_rows
