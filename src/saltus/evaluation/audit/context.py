"""Hold what all checks of a run share: the two sides, what the server understands, prompts and settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from saltus.evaluation.audit.client import Reply, Request, Side, answer_all
from saltus.evaluation.audit.features import Features
from saltus.evaluation.benchmarks.graders import Grader
from saltus.evaluation.benchmarks.suites import Task


@dataclass(frozen=True)
class AuditSettings:
    """How much is sent: tokens of an answer, repetitions of each request, clients at once, and the first seed."""

    max_tokens: int = 48
    repeats: int = 2
    clients: int = 16
    seed: int = 0


@dataclass(frozen=True)
class GradedSuite:
    """Tasks whose answers are graded."""

    name: str
    tasks: Sequence[Task]
    grader: Grader


@dataclass
class Audit:
    """What a check gets. `on` speculates, `off` is what it is compared with."""

    on: Side
    off: Side
    features: Features
    prompts: Sequence[str]
    settings: AuditSettings = field(default_factory=AuditSettings)
    suites: Sequence[GradedSuite] = ()
    on_answer: Callable[[], Any] = lambda: None

    @property
    def sides(self) -> tuple[Side, Side]:
        """Both sides, the speculating one first."""
        return self.on, self.off

    def answers(self, side: Side, requests: Sequence[Request], clients: int = 1) -> list[Reply]:
        """Replies in the order of `requests`."""
        return answer_all(side, requests, clients, self.on_answer)

    def paired_answers(self, requests: Sequence[Request], repeats: int, clients: int = 1) -> list[list[list[Reply]]]:
        """For both sides, repetitions of each request: [side][request][repetition]. Sides take turns in going first."""
        rounds: list[list[list[Reply]]] = [[], []]
        for number in range(repeats):
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                rounds[side].append(self.answers(self.sides[side], requests, clients))
        return [[list(replies) for replies in zip(*side, strict=True)] for side in rounds]
