"""Draft token by token with a draft model, one call for each draft token."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import replace

import numpy as np

from saltus.core.coupling import draft_tokens, largest, pick_token
from saltus.core.distributions import TargetDistributions
from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.core.noise import Noise
from saltus.core.picking import Distribution
from saltus.core.rules import Rule, reject
from saltus.core.sampling import Sampling, float_row, most_likely
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
    top_k: int = 1,
) -> Generator[ForwardInputs, ForwardOutputs, Sequence[Branch]]:
    """A branch of up to `num_draft_tokens` tokens; it ends where the product of the drafts' probabilities is too small.

    Under `match` the `top_k` − 1 next tokens after each path are offered, too, each at the end of a branch of its own.

    Under `match` drafts are picked with the text's own random numbers, so that they agree with the target's tokens
    wherever the distributions agree; under `reject` with fresh ones, and the rule gets the draft distributions. Hidden
    states are an input of the first call only, whose outputs may be known already. A network that returns no logits, or
    none that are finite, ends the branch, and so do bans that leave no token.
    """
    canvas = inputs.canvas
    stream = f"{source}/{canvas.num_decided}"  # new in each step: random numbers are never used twice
    tokens: list[int] = []
    probabilities: list[float] = []
    distributions: list[Distribution] = []
    siblings: list[Branch] = []
    value = 1.0
    while len(tokens) < num_draft_tokens and value >= min_probability:
        outputs, first_outputs = first_outputs or (yield inputs), None
        if not len(outputs.logits) or not math.isfinite(float(outputs.logits[0].max())):
            break  # a draft model that is broken cannot break the text
        answers, others = TargetDistributions(inputs, outputs, sampling, noise), []
        try:
            if rule is reject:
                distribution = answers[-1]
                token = pick_token(distribution, noise, stream, inputs.canvas.open_positions[0])
                stated = distribution.peak  # must not depend on the token
                distributions.append(distribution)
            else:
                (token, stated), *others = _favoured(answers, top_k)
        except ValueError:  # all tokens are banned, as after one that would end the text
            break
        if sampling.greedy:
            stated = most_likely(outputs.logits[0])[1]
        siblings += [Branch([*tokens, other], [*probabilities, chance], source) for other, chance in others]
        value *= stated
        tokens.append(token)
        probabilities.append(stated)
        inputs = replace(inputs, canvas=canvas.fill(np.array(tokens, dtype=np.int64)), hidden_states=None)
    return [Branch(tokens, probabilities, source, distributions if rule is reject else None), *siblings]


def _favoured(answers: TargetDistributions, count: int) -> list[tuple[int, float]]:
    """The tokens that the text's own random numbers favour after the text, and what speaks for each; best first."""
    ids, row = answers.outputs.token_ids, float_row(answers.outputs.logits[0])
    if count == 1 or not np.isfinite(row.max()):
        return [answers.draft(-1)]
    if not answers.sampling.plain_argmax:
        return draft_tokens(answers[-1], answers.noise, "text", answers.position(-1), count)
    best, weights = largest(row, count), np.exp(row - row.max())
    tokens = best if ids is None else ids.cpu().numpy()[best]
    return list(zip(tokens.tolist(), (weights[best] / weights.sum()).tolist(), strict=True))
