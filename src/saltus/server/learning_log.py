"""Say in the log how far a server's learning is: beside busy texts it may take hours until a drafter is replaced."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field

from saltus.methods.ptp.training.online import Evaluation, LearningProgress

log = logging.getLogger("saltus.server")

LOG_SECONDS = 60.0  # between two lines


@dataclass
class LearningLog:
    """A line now and then, while there is something to learn from."""

    evaluation_texts: int
    texts: int = 0
    unevaluated: int = 0
    steps: int = 0
    evaluations: int = 0
    tokens_per_call: dict[str, float] | None = None  # of the last evaluation
    written: float = field(default_factory=time.monotonic)

    def record(self, progress: LearningProgress) -> None:
        """Count a piece of work."""
        self.texts, self.unevaluated = progress.texts, progress.unevaluated
        self.steps += progress.steps
        if progress.evaluation is not None:
            self.evaluations += 1
            self.tokens_per_call = tokens_per_call(progress.evaluation)
        self.write()

    def write(self) -> None:
        """A line, unless there was one a short time ago."""
        if time.monotonic() - self.written < LOG_SECONDS:
            return
        self.written = time.monotonic()
        waiting = {"texts_for_evaluation": self.unevaluated, "needed": self.evaluation_texts}
        counts = {"steps": self.steps, "evaluations": self.evaluations, "tokens_per_call": self.tokens_per_call}
        log.info(json.dumps({"event": "learning", "texts": self.texts, **waiting, **counts}))


def tokens_per_call(evaluation: Evaluation) -> dict[str, float]:
    """An evaluation as the log has it."""
    return {"before": round(evaluation.served, 3), "after": round(evaluation.trained, 3)}
