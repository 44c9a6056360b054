"""Draft with DFlash's block, corrected by the token before each draft, and with a predicted acceptance (DSpark).

A low-rank matrix of pairs of tokens adds to the logits of a draft (B = W₁ W₂, perhaps gated by the hidden state), and a
linear layer predicts how likely the draft is accepted: the controller verifies as many tokens as these probabilities
say. The formats are those of DeepSeek's DeepSpec, of SpecForge and of speculators.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from saltus.loading.stored_tensors import stored_tensors
from saltus.methods.published.dflash_files import all_settings, is_of_speculators, load_published, read_shape
from saltus.methods.published.dflash_model import DFlashModel
from saltus.methods.published.dflash_network import DFlashNetwork
from saltus.methods.shared.draft_tree import PositionPredictions
from saltus.methods.shared.drafter_files import embeddings_of
from saltus.methods.shared.logit_correction import TableRows
from saltus.methods.shared.published_files import is_named, read_config, refuse
from saltus.methods.shared.row_candidates import rows_likely_tokens
from saltus.models.protocols import TargetNetwork

ARCHITECTURES = {"Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator", "Lfm2DSparkDraftModel"}
HEADS = ("vanilla", "gated")  # of pairs; the recurrent one is not computed
KIND = "a DSpark drafter"
FLAT_DEFAULTS = {"markov_rank": 0, "markov_head_type": "vanilla", "enable_confidence_head": False}
SPECULATORS_DEFAULTS = {
    "markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip


def recognises(config: Mapping[str, Any]) -> bool:
    """True for the config.json of a published DSpark drafter with layers of Qwen3."""
    return is_named(config, "dspark", ARCHITECTURES)


def load_network(folder: Path, target: TargetNetwork, target_name: str) -> DFlashNetwork:
    """The drafter for this target. Errors: ValueError of one line."""
    config = read_config(folder)
    of_speculators, vocabulary = is_of_speculators(config), len(embeddings_of(target.model)[0])
    given = (SPECULATORS_DEFAULTS if of_speculators else FLAT_DEFAULTS) | all_settings(config)
    rank, head = given["markov_rank"], given["markov_head_type"]
    refuse(folder, KIND, {f"the head {head} for pairs of tokens": rank and head not in HEADS})
    shape = read_shape(config, folder, KIND, from_anchor=not config.get("dspark_bonus_anchor", False))
    more: dict[str, tuple[int, ...]] = {}
    if rank:
        drafted = given.get("draft_vocab_size", vocabulary) if of_speculators else vocabulary
        more = {"markov_head.markov_w1.weight": (vocabulary, rank), "markov_head.markov_w2.weight": (drafted, rank)}
        if head == "gated":
            more["markov_head.gate_proj.weight"] = (rank, shape.hidden + rank)
            more["markov_head.gate_proj.bias"] = (rank,)
    if given["enable_confidence_head"]:
        by_pair = given.get("confidence_head_with_markov")
        if by_pair is None:  # Liquid AI's do not say it
            by_pair = _confidence_inputs(folder) != shape.hidden
        more["confidence_head.proj.weight"] = (1, shape.hidden + (rank if by_pair else 0))
        more["confidence_head.proj.bias"] = (1,)
    model, weights, order = load_published(folder, target.model, target_name, KIND, shape, more=more)
    short = {name.removesuffix(".weight").rpartition("_head.")[2]: weight for name, weight in weights.items()}
    if rank:
        short["markov_w2"] = short["markov_w2"][order]
    return DFlashNetwork(model, target, predictor=MarkovPredictor(model, short, int(rank)))


def _confidence_inputs(folder: Path) -> int | None:
    """How many numbers the confidence is computed from; None where there is none, or the file does not list it."""
    for name, tensor in stored_tensors(folder).items():
        if name.endswith("confidence_head.proj.weight") and tensor.shape is not None:
            return tensor.shape[-1]
    return None


@dataclass
class MarkovPredictor:
    """The predictions of a block, given the token before each draft.

    `weights` are markov_w1, markov_w2, gate_proj, gate_proj.bias, proj and proj.bias, where there are such.
    """

    model: DFlashModel
    weights: Mapping[str, Tensor]
    rank: int

    def __post_init__(self) -> None:
        self.token_ids = self.model.tokens.cpu().numpy()
        self.numbers = {
            name: weight.float().cpu().numpy() for name, weight in self.weights.items() if "markov" not in name
        }
        self.left = self.right = None
        if self.rank:
            self.left, self.right = TableRows(self.weights["markov_w1"]), TableRows(self.weights["markov_w2"])

    def __call__(self, logits: Tensor, hidden_states: Tensor) -> PositionPredictions:
        states, likely = hidden_states.float().cpu().numpy(), rows_likely_tokens(logits)
        predictions = PositionPredictions(
            likely, self.token_ids, self if self.rank else None, self.position_inputs(hidden_states), False
        )
        if "proj" in self.numbers:
            weight, bias = self.numbers["proj"][0], float(self.numbers["proj.bias"][0])
            fixed = states @ weight[: states.shape[1]] + bias

            def confidence(position: int, token: int) -> float:
                value, pair = float(fixed[position]), weight[states.shape[1] :]
                if self.left is not None and len(pair):
                    value += float(self.left[token] @ pair)
                return 1 / (1 + math.exp(-min(max(value, -60.0), 60.0)))

            predictions.confidence = confidence
        return predictions

    def position_inputs(self, hidden_states: Tensor) -> np.ndarray:
        """The gates before their part of the token, [positions, rank]; without gates nothing."""
        if "gate_proj" not in self.numbers:
            return np.zeros((len(hidden_states), 0), dtype=np.float32)
        states = hidden_states.float().cpu().numpy()
        return states @ self.numbers["gate_proj"][:, : states.shape[1]].T + self.numbers["gate_proj.bias"]

    def vector(self, position: np.ndarray, left: int, second_left: int | None) -> tuple[float, np.ndarray]:
        """The sharpness, which is 1, and the vector [rank] of one position."""
        assert self.left is not None
        embedded = self.left[left]
        if not len(position):
            return 1.0, embedded
        gate = position + self.numbers["gate_proj"][:, -self.rank :] @ embedded
        return 1.0, embedded / (1 + np.exp(-gate))
