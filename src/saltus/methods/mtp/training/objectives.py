"""Training of a head for multi-token prediction as an objective of recipes: `kind = "mtp-head"`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from saltus.core.value_types import require_at_least
from saltus.methods.mtp.trained_head import KIND
from saltus.methods.mtp.training.head import MtpShape, MtpTrainingTask
from saltus.training.objective import CachedStateObjective


@dataclass(frozen=True)
class MtpHeadSettings:
    """One layer of the target's architecture beside it."""

    window: int = 4  # drafts that it is trained for, each read with the output of the one before
    autocast: bool = False  # compute in bfloat16
    vocabulary: int = 8192  # the most frequent tokens, which are drafted; 0: all of the target's

    def __post_init__(self) -> None:
        require_at_least(self, "a head's ", window=1)
        if self.vocabulary < 0:
            raise ValueError(f"a head's vocabulary is {self.vocabulary}, but must be 1 or more, or 0 for all tokens")

    def shape(self, target: Any) -> MtpShape:
        """The shape for a Hugging Face model."""
        return MtpShape(target.config.get_text_config().hidden_size, self.window)


class MtpHeadObjective(CachedStateObjective):
    """A head for a target whose checkpoint has none."""

    method, settings_type, task = "mtp", MtpHeadSettings, MtpTrainingTask


OBJECTIVES = {KIND: MtpHeadObjective()}
