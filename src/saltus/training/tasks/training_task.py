"""Say what a training run needs of whatever it trains: a loss for every step, an examination, and a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class TrainingTask(Protocol):
    """Something to train by `training.loop.train`."""

    @property
    def module(self) -> nn.Module:
        """What is trained."""
        ...

    def initialize_from(self, folder: Path) -> None:
        """Go on with what was saved there, before any step. Errors: ValueError where it does not fit."""
        ...

    def loss(self, step: int) -> Tensor:
        """Of a step: a function of the step and the weights alone."""
        ...

    def evaluate(self) -> dict[str, float]:
        """Held-out tokens per call of chains, "greedy" and "sampled", the verifier's own token counted."""
        ...

    def save(self, folder: Path, card: Mapping[str, Any]) -> None:
        """Keep what was trained, for use; the card says how it was made."""
        ...


def evaluate_greedy_and_sampled(module: nn.Module, tokens_per_call: Callable[[bool], float]) -> dict[str, float]:
    """A course's report: what is counted on greedy texts (True) and on sampled ones, without dropout."""
    training = module.training
    module.eval()
    found = {"greedy": tokens_per_call(True), "sampled": tokens_per_call(False)}
    module.train(training)
    return found
