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

from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.methods.published.eagle_model import load_eagle
from saltus.methods.published.eagle_network import EagleNetwork
from saltus.methods.shared.context_rows import ContextKVCache, unread_states
from saltus.methods.shared.draft_tree import DraftOutputs
from saltus.methods.shared.published_files import CONFIG_FILE, read_config
from saltus.methods.shared.query_predictions import rows_linear
from saltus.models.cpu.torch_decoder import normed
from saltus.models.protocols import TargetNetwork

ARCHITECTURES = {"PEagleDraftModel", "PEagleSpeculator", "PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM"}
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # of the mask token, as engines read them
MASK_STATE = "mask_hidden"


def recognises(config: Mapping[str, Any]) -> bool:
    """True for the config.json of a published P-EAGLE head."""
    if kind := config.get("speculators_model_type"):
        return kind == "peagle"
    return bool(ARCHITECTURES & set(config.get("architectures") or ()))


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

    def _run(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[ContextKVCache]) -> list[ForwardOutputs]:
        model, layers = self.model, self.model.shape.hidden_state_layers
        texts = [each.canvas.decided_prefix for each in batch]
        pairs = zip(batch, kv_caches, strict=True)
        states = [unread_states(inputs, kv_cache, self.target, layers) for inputs, kv_cache in pairs]
        masks = [max(len(each.uniforms) - 1, 0) for each in batch]
        read = [torch.cat([given, self.mask_state.to(given.dtype).expand(count, -1)])
                for given, count in zip(states, masks, strict=True)]  # fmt: skip
        tokens = [np.concatenate([text[-len(given) :], np.full(count, self.mask_token)])
                  for text, given, count in zip(texts, states, masks, strict=True)]  # fmt: skip
        starts = [len(text) - cache.first_position - len(given)
                  for text, cache, given in zip(texts, kv_caches, states, strict=True)]  # fmt: skip
        by_text = self.layers.read(tokens, read, kv_caches, starts)
        last = [rows[-(count + 1) :] for rows, count in zip(by_text, masks, strict=True)]
        normalised = normed(model.norm, torch.cat(last))
        logits = rows_linear(model.lm_head, normalised)
        counts, outputs, num_rows = [count + 1 for count in masks], [], sum(map(len, tokens))
        asked, rows = [len(each.uniforms) for each in batch], [logits.split(counts), normalised.split(counts)]
        predicted = self.predictor.of_texts(
            [(own[:queries], hidden[:queries]) for queries, own, hidden in zip(asked, *rows, strict=True)]
        )
        for inputs, cache, given, queries, row_logits, row_states, predictions in zip(
            batch, kv_caches, states, asked, *rows, predicted, strict=True
        ):
            cache.tokens = inputs.canvas.decided_prefix[cache.first_position :].copy()
            logits_kept, states_kept = (torch.cat([rows[:1], rows[:queries]]) for rows in (row_logits, row_states))
            outputs.append(
                DraftOutputs(
                    logits_kept, states_kept, 0.0, len(given), num_rows, model.tokens, predictions=predictions
                )
            )  # fmt: skip
        return outputs
