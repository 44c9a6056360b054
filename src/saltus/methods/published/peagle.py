"""Draft a block in one pass of an EAGLE-3 head, whose rows after the first read masks (P-EAGLE, arXiv:2602.01469).

The first row is EAGLE-3's: the last decided token beside the target's hidden states before it. Each row after it holds
the embedding of a mask token beside a trained state, and sees the text and the rows before it. So row i predicts the
token i + 1 places after the last decided one, without knowledge of the tokens in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from saltus.methods.published.eagle_model import load_eagle
from saltus.methods.published.eagle_network import EagleNetwork
from saltus.methods.shared.context_rows import ContextKVCache
from saltus.methods.shared.published_files import CONFIG_FILE, is_named, read_config
from saltus.methods.shared.query_predictions import rows_linear
from saltus.models.cpu.torch_decoder import normed
from saltus.models.protocols import TargetNetwork

ARCHITECTURES = {"PEagleDraftModel", "PEagleSpeculator", "PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM"}
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # of the mask token, as engines read them
MASK_STATE = "mask_hidden"


def recognises(config: Mapping[str, Any]) -> bool:
    """True for the config.json of a published P-EAGLE head."""
    return is_named(config, "peagle", ARCHITECTURES)


def load_network(folder: Path, target: TargetNetwork, target_name: str) -> PEagleNetwork:
    """The head for this target. Errors: ValueError of one line."""
    more = {MASK_STATE: lambda shape: (1, 1, len(shape.hidden_state_layers) * shape.hidden)}
    model, weights = load_eagle(folder, target.model, target_name, "a P-EAGLE head", more)
    config, vocabulary = read_config(folder), len(model.embeddings[0])
    mask = next((config[key] for key in MASK_KEYS if config.get(key) is not None), None)
    if type(mask) is not int or not 0 <= mask < vocabulary:
        raise ValueError(
            f"{folder / CONFIG_FILE} has the mask token {mask}, and {target_name} has {vocabulary:,} tokens;"
            " set mask_token_id to that of its training"
        )
    return PEagleNetwork(model, target, mask, weights[MASK_STATE].flatten())


@dataclass
class PEagleNetwork(EagleNetwork):
    """Logits of all queries from one pass."""

    mask_token: int
    mask_state: Float[Tensor, "states"]  # in place of the target's hidden states

    def _query_rows(
        self, texts: Sequence[np.ndarray], states: Sequence[Tensor], kv_caches: Sequence[ContextKVCache],
        starts: Sequence[int], queries: Sequence[int],
    ) -> tuple[list[tuple[Tensor, Tensor]], int]:  # fmt: skip
        masks = [max(count - 1, 0) for count in queries]
        read = [torch.cat([given, self.mask_state.to(given.dtype).expand(count, -1)])
                for given, count in zip(states, masks, strict=True)]  # fmt: skip
        tokens = [np.concatenate([text[-len(given) :], np.full(count, self.mask_token)])
                  for text, given, count in zip(texts, states, masks, strict=True)]  # fmt: skip
        by_text = self.layers.read(tokens, read, kv_caches, starts)
        last = [rows[-(count + 1) :] for rows, count in zip(by_text, masks, strict=True)]
        normalised = normed(self.model.norm, torch.cat(last))
        logits, counts = rows_linear(self.model.lm_head, normalised), [count + 1 for count in masks]
        return list(zip(logits.split(counts), normalised.split(counts), strict=True)), sum(map(len, tokens))
