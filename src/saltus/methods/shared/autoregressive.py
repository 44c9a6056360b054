"""Draft token by token with a draft model, one call for each draft token."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import replace

import numpy as np

from saltus.core.coupling import pick_token
from saltus.core.distributions import TargetDistributions
from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.core.noise import Noise
from saltus.core.rules import Rule, reject
from saltus.core.sampling import Distribution, Sampling, most_likely
from saltus.core.tree import Branch


def draft_autoregressively(
    inputs: ForwardInputs,
    num_draft_tokens: int,
    min_probability: float,
    noise: Noise,
    sampling: Sampling,
    rule: Rule,
    source: str,
    first_outputs: ForwardOutputs | None = None,
) -> Generator[ForwardInputs, ForwardOutputs, Sequence[Branch]]:
    """A branch of up to `num_draft_tokens` tokens; it ends where the product of the drafts' probabilities is too small.

    Under `match` drafts are picked with the text's own random numbers, so that they agree with the target's tokens
    wherever the distributions agree; under `reject` with fresh ones, and the rule gets the draft distributions. Hidden
    states are an input of the first call only, whose outputs may be known already. A network that returns no logits
    ends the branch.
    """
    canvas = inputs.canvas
    stream = f"{source}/{canvas.num_decided}"  # new in each step: random numbers are never used twice
    tokens: list[int] = []
    probabilities: list[float] = []
    distributions: list[Distribution] = []
    value = 1.0
    while len(tokens) < num_draft_tokens and value >= min_probability:
        outputs, first_outputs = first_outputs or (yield inputs), None
        if not len(outputs.logits):
            break
        answers = TargetDistributions(inputs, outputs, sampling, noise)
        if rule is reject:
            distribution = answers[-1]
            token = pick_token(distribution, noise, stream, inputs.canvas.open_positions[0])
            stated = distribution.peak  # must not depend on the token
            distributions.append(distribution)
        else:
            token, stated = answers.draft(-1)
        if sampling.greedy:
            stated = most_likely(outputs.logits[0])[1]
        if math.isnan(stated):
            break
        value *= stated
        tokens.append(token)
        probabilities.append(stated)
        inputs = replace(inputs, canvas=canvas.fill(np.array(tokens, dtype=np.int64)), hidden_states=None)
    return [Branch(tokens, probabilities, source, distributions if rule is reject else None)]
