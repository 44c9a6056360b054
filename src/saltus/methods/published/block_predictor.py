"""Predict the tokens of a block before they are corrected by the drafts before them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from saltus.methods.published.dflash_model import DFlashModel
from saltus.methods.shared.draft_tree import PositionPredictions
from saltus.methods.shared.row_candidates import rows_likely_tokens


@dataclass
class BlockPredictor:
    """The predictions of a block by its logits alone."""

    model: DFlashModel

    def __post_init__(self) -> None:
        self.token_ids = self.model.tokens.cpu().numpy()

    def __call__(self, logits: Tensor, hidden_states: Tensor) -> PositionPredictions:
        return PositionPredictions(rows_likely_tokens(logits), self.token_ids, reads_uniforms=False)
