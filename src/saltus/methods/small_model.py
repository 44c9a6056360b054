"""Propose what a smaller model would write: it drafts token by token, the target verifies them all in one call."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from saltus.core.canvas import Canvas
from saltus.core.decode import Drafter
from saltus.core.forward import Forward, Laws, Reply, Step
from saltus.core.noise import Noise
from saltus.core.rules import Rule, reject
from saltus.core.sampling import Law, Sampling, log_probability, pick, probability
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
            tokens: list[int] = []
            chances: list[float] = []
            laws: list[Law] = []
            stream = f"small_model/{canvas.done}"  # of one step: a draft never meets a uniform that was used before
            value = 1.0
            while len(tokens) < min(self.length, room):
                asked = Forward(canvas.fill(np.array(tokens, dtype=np.int64)), to="drafter")
                answers = Laws(asked, (yield asked), sampling, noise)
                if rule is reject:
                    u = noise.at(stream, asked.canvas.open[:1])[0]
                    law = answers[-1]
                    token, chance = pick(u, law), float(law.weights.max()) / law.total
                    laws.append(law)
                else:
                    token = answers.pick(-1)
                    chance = probability(token, answers[-1])
                if sampling.greedy:
                    chance = math.exp(log_probability(answers.reply.logits[0], token))
                value *= chance
                tokens.append(token)
                chances.append(chance)
                if value < self.least:
                    break
            return [Branch(tokens, chances, "small_model", laws if rule is reject else None)]

        return offer
