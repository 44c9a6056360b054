"""Draft token by token: a network says what follows the text and the drafts so far, and the next draft is picked."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import replace

import numpy as np

from saltus.core.forward import Forward, Laws, Reply
from saltus.core.noise import Noise
from saltus.core.rules import Rule, reject
from saltus.core.sampling import Law, Sampling, likeliest, pick, probability
from saltus.core.tree import Branch


def token_by_token(
    asked: Forward, length: int, least: float, noise: Noise, sampling: Sampling, rule: Rule, source: str
) -> Generator[Forward, Reply, Sequence[Branch]]:
    """A branch of up to `length` tokens; it ends where all of it is right with a chance below `least`, as stated.

    Under `match` drafts are picked with the text's own uniforms, so that they are what the target would write as far
    as the laws agree; under `reject` with fresh ones, and the rule is told the laws. `hidden` is shown once.
    Of a network that answers without logits no more is wanted.
    """
    canvas = asked.canvas
    stream = f"{source}/{canvas.done}"  # of one step: a draft never meets a uniform that was used before
    tokens: list[int] = []
    chances: list[float] = []
    laws: list[Law] = []
    value = 1.0
    while len(tokens) < length and value >= least:
        reply = yield asked
        if not len(reply.logits):
            break
        answers = Laws(asked, reply, sampling, noise)
        if rule is reject:
            law = answers[-1]
            token, chance = pick(noise.one(stream, asked.canvas.open[0]), law), law.peak
            laws.append(law)
        else:
            token = answers.pick(-1)
            chance = probability(token, answers[-1])
        if sampling.greedy:
            chance = likeliest(reply.logits[0])[1]
        if math.isnan(chance):
            break
        value *= chance
        tokens.append(token)
        chances.append(chance)
        asked = replace(asked, canvas=canvas.fill(np.array(tokens, dtype=np.int64)), hidden=None)
    return [Branch(tokens, chances, source, laws if rule is reject else None)]
