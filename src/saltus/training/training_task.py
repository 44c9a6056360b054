"""The interface of a training task: a loss for every step, an evaluation, and a folder for the result."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from saltus.training.data.window_dataset import Batch, WindowDataset, WindowSettings
from saltus.training.loop.processes import ONE_PROCESS, Processes
from saltus.training.loop.training_loop import Schedule

TOKENS_PER_CALL = "held-out tokens per call"


class TrainingTask(ABC):
    """What `training.run.TrainingRun` trains: a module, with everything that its objective needs."""

    module: Any  # the nn.Module whose weights are trained
    model: Any  # the Hugging Face model that a loss runs, if it runs one
    autocast: bool = False  # compute in bfloat16
    processes: Processes = ONE_PROCESS  # that share the texts of a step
    phase: str = ""  # of a task that follows another: a folder inside the work folder
    schedule: Schedule | None = None  # of such a task; None: the recipe's
    metrics_name: str = TOKENS_PER_CALL  # what `evaluate` measures
    metrics_unit: str = " a call"  # as status lines show it

    @property
    def queries_per_step(self) -> int:
        """About how many rows of a step have a loss; 0 if unknown."""
        return 0

    @property
    def drafts_per_call(self) -> int:
        """The most drafts that the tokens per call of `evaluate` count; 0 where it measures something else."""
        return 0

    def dataset_digest(self) -> str:
        """A digest of the texts that a resumed run must have; empty if the files of the work folder identify them."""
        return ""

    def initialize_from(self, folder: Path) -> None:
        """Start with the weights of a saved result. Errors: ValueError if they do not fit."""
        raise ValueError(f"{type(self).__name__} cannot start from {folder}; leave out --from")

    @abstractmethod
    def loss(self, step: int) -> Tensor:
        """The loss of a step: a function of the step number and the weights alone.

        With several processes a part of it: a sum over this one's texts, divided by the mean number of terms of a
        process. Its average over the processes is the loss. Random numbers are those of all texts in one process.
        """

    def evaluate(self) -> dict[str, float]:
        """By name, what `metrics_name` says: tokens per call, written greedily and sampled, without dropout."""
        training = self.module.training
        self.module.eval()
        metrics = {"greedy": self._tokens_per_call(True), "sampled": self._tokens_per_call(False)}
        self.module.train(training)
        return metrics

    def _tokens_per_call(self, greedy: bool) -> float:
        """Correct leading drafts of a chain, plus the verifier's own token; NaN without such texts."""
        raise NotImplementedError

    def acceptance_by_position(self) -> dict[str, list[float]]:
        """By the names of `evaluate`, the share of held-out drafts whose first k tokens are right, by k.

        Up to the last k with any; empty if unknown.
        """
        return {}

    def accuracy_by_depth(self) -> dict[str, list[float]]:
        """By what queries are conditioned on, the share of held-out tokens that each predicts; empty if unknown."""
        return {}

    @property
    def first_conditioned_query(self) -> int:
        """The first query of a window that is conditioned on a uniform, 0 or 1, where any is."""
        return 0

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self.autocast)

    @property
    def _device(self) -> torch.device:
        return self.model.device

    @abstractmethod
    def save(self, folder: Path, card: Mapping[str, Any]) -> None:
        """Write the result for use; the card describes how it was made."""


class WindowTrainingTask(TrainingTask):
    """A task whose batches are windows of texts."""

    window_settings: WindowSettings
    window_dataset: Any  # a WindowDataset, made by the subclass

    @property
    def queries_per_step(self) -> int:
        return self.window_settings.batch_size * self.window_settings.windows_per_text * self.window_dataset.window

    @property
    def drafts_per_call(self) -> int:
        return self.window_dataset.window

    def training_batch(self, step: int) -> Batch:
        """This process's texts of a step's batch."""
        batch: Batch = self.window_dataset.training_batch(step)
        return batch.select(self.processes.share(len(batch.tokens)))

    def _tokens_per_call(self, greedy: bool) -> float:
        counts = self.window_tokens(greedy)
        return float(counts.mean()) if len(counts) else math.nan

    def acceptance_by_position(self) -> dict[str, list[float]]:
        tokens = {"greedy": self.window_tokens(True), "sampled": self.window_tokens(False)}
        return {
            name: [float((counts > k).double().mean()) for k in range(1, int(counts.max()))]
            for name, counts in tokens.items()
            if len(counts)
        }

    @torch.no_grad()
    def window_tokens(self, greedy: bool, num_windows: int = 8) -> Float[Tensor, "all_windows"]:
        """The tokens of a call at each held-out window, `num_windows` of each text, always the same ones."""
        dataset: WindowDataset = self.window_dataset
        matches = [self.matching_drafts(batch) for batch in dataset.validation_batches(greedy, num_windows)]
        counts = [1 + match.to(torch.int64).cumprod(-1).sum(-1).double() for match in matches]
        return torch.cat(counts) if counts else torch.empty(0, dtype=torch.float64)

    @abstractmethod
    def matching_drafts(self, batch: Batch) -> Bool[Tensor, "all_windows drafts"]:
        """True where the module's draft is the target token; False for tokens outside the loss mask."""
