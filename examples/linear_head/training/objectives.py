"""Training of linear heads as an objective of recipes: `kind = "linear-head"`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from saltus.training.cached_state_task import CachedStateTask
from saltus.training.data.window_dataset import Batch
from saltus.training.objective import CachedStateObjective

from ..network import LinearHeadModel, load, save


@dataclass(frozen=True)
class LinearHeadSettings:
    """The recipe's table [linear-head]."""

    window: int = 4  # tokens that are drafted one after the other
    vocabulary: int = 4096  # the most frequent tokens, which are drafted; 0: all of the target's
    hidden_state_layers: ClassVar[tuple[int, ...]] = ()  # besides the last one

    def shape(self, target: Any) -> LinearHeadSettings:
        """The sizes for a target."""
        return self


@dataclass(eq=False)
class LinearHeadTask(CachedStateTask):
    """Cross-entropy of the tokens of a window, each given those before it."""

    def _new_module(self, draft_tokens: Tensor) -> LinearHeadModel:
        return LinearHeadModel(draft_tokens, self.target)

    @classmethod
    def load_initial(cls, folder: Path, target: Any, target_name: str, shape: Any) -> LinearHeadModel:
        return load(folder, target, target_name)

    def initialize_from(self, folder: Path) -> None:
        self._set_module(load(folder, self.target, self.target_name))

    def loss(self, step: int) -> Tensor:
        batch = self.training_batch(step)
        tokens, counted = self._draft_targets(batch)
        weights = counted * self.window_settings.discount ** torch.arange(counted.shape[-1], device=counted.device)
        losses = [
            F.cross_entropy(logits.flatten(0, 1), tokens[..., depth].flatten(), reduction="none").view(tokens.shape[:2])
            for depth, logits in enumerate(self._logits(batch))
        ]
        return self.processes.weighted_mean(torch.stack(losses, -1), weights, floor=1.0)

    def matching_drafts(self, batch: Batch) -> Tensor:
        tokens, counted = self._draft_targets(batch)
        drafts = torch.stack([logits.argmax(-1) for logits in self._logits(batch)], -1)
        return (counted & (drafts == tokens)).flatten(0, 1)

    def save(self, folder: Path, card: Mapping[str, Any]) -> None:
        save(self.module, folder, self.target)

    def _draft_targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """[batch, windows, window]: the tokens as columns of the logits, and True where they have a loss."""
        columns = self.draft_indices[batch.targets]
        return columns.clamp_min(0).to(self._device), (batch.loss_mask & (columns >= 0)).to(self._device)

    def _logits(self, batch: Batch) -> Iterator[Tensor]:
        """[batch, windows, drafted tokens] for each position, given the true tokens before it."""
        first = batch.target_rows[..., 0]  # of the corpus; a verification call knows the state before the last token
        state = self.corpus.hidden_states[first - 2].to(self._device).float()
        before = torch.cat([self.corpus.tokens[first - 1][..., None], batch.targets], -1)
        for depth in range(self.shape.window):
            state = self.module(state, before[..., depth])
            yield self.module.logits(state)


class LinearHeadObjective(CachedStateObjective):
    """A linear layer, on the target's last hidden states."""

    method, settings_type, task = "linear_head", LinearHeadSettings, LinearHeadTask


OBJECTIVES = {"linear-head": LinearHeadObjective()}
