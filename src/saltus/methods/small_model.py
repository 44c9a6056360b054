"""Propose what a smaller model would write: it drafts token by token, the target verifies them all in one call."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from saltus.core.canvas import Canvas
from saltus.core.decode import Drafter
from saltus.core.forward import Forward, Reply, Step
from saltus.core.noise import Noise
from saltus.core.rules import Rule
from saltus.core.sampling import Sampling
from saltus.core.token_by_token import token_by_token
from saltus.core.tree import Branch


@dataclass(frozen=True)
class SmallModel:
    """Speculative decoding (Leviathan et al. 2023) with any model of the same vocabulary as drafter.

    Under `match` the drafter picks with the text's own uniforms, so that it writes what the target would as far as
    their laws agree; under `reject` it draws from its own law, which the rule is told.
    """

    model: str = "smollm2-135m"  # the drafter: a name or a folder
    length: int = 5  # tokens drafted, at most
    least: float = 0.2  # stop where a draft is right with a chance below this, by the drafter's own account

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"small_model: length is {self.length}, but must be 1 or more")
        if not 0 <= self.least < 1:
            raise ValueError(f"small_model: least is {self.least}, but must lie in [0, 1)")

    @property
    def models(self) -> dict[str, str]:
        return {"drafter": self.model}

    def drafter(self, noise: Noise, sampling: Sampling, rule: Rule) -> Drafter:
        def offer(canvas: Canvas, last: Step | None, room: int) -> Generator[Forward, Reply, Sequence[Branch]]:
            asked, length = Forward(canvas, to="drafter"), min(self.length, room)
            return token_by_token(asked, length, self.least, noise, sampling, rule, "small_model")

        return offer
