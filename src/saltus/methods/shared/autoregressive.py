"""Draft token by token with a draft model, one call for each draft token."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import replace

import numpy as np

from saltus.core.candidates import Candidates, truncated_distribution
from saltus.core.coupling import draft_tokens, largest, pick_token
from saltus.core.distributions import TargetDistributions
from saltus.core.forward import ForwardInputs, ForwardOutputs, GumbelMax
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
    wherever the distributions agree; under `reject` with fresh ones, and the rule gets the draft distributions.
    `source` names the drafter in the branches, and those random numbers. Hidden states are an input of the first call
    only, whose outputs may be known already. A network that returns no logits, or none that are finite, ends the
    branch, and so do bans that leave no token.
    """
    canvas = inputs.canvas
    inputs = _for_device(inputs, noise, sampling, rule, top_k)
    stream = f"{source}/{canvas.num_decided}"  # new in each step: random numbers are never used twice
    tokens: list[int] = []
    probabilities: list[float] = []
    distributions: list[Distribution] = []
    siblings: list[Branch] = []
    value = 1.0
    while len(tokens) < num_draft_tokens and value >= min_probability:
        outputs, first_outputs = first_outputs or (yield inputs), None
        answers, others = TargetDistributions(inputs, outputs, sampling, noise), []
        if not len(outputs.logits) or not math.isfinite(_greatest_logit(outputs)):
            break  # a draft model that is broken cannot break the text
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
            stated = (
                most_likely(outputs.logits[0])[1] if outputs.candidates is None else 1 / outputs.candidates[0].total
            )
        siblings += [Branch([*tokens, other], [*probabilities, chance], source) for other, chance in others]
        value *= stated
        tokens.append(token)
        probabilities.append(stated)
        filled = canvas.fill(np.array(tokens, dtype=np.int64))
        inputs = replace(inputs, canvas=filled, hidden_states=None, draft_probabilities=tuple(probabilities))
    return [Branch(tokens, probabilities, source, distributions if rule is reject else None), *siblings]


def _for_device(inputs: ForwardInputs, noise: Noise, sampling: Sampling, rule: Rule, top_k: int) -> ForwardInputs:
    """Let a GPU find what is drafted, where that is enough, in place of rows of logits that the host would read."""
    if rule is reject:
        return replace(inputs, reads_logits=True)
    if sampling.plain_gumbel_max and top_k == 1:
        inputs = replace(inputs, gumbel_max=GumbelMax(noise, sampling.temperature))
    elif not (sampling.plain_argmax or sampling.needs_candidates):
        return replace(inputs, reads_logits=True)
    return replace(inputs, candidate_temperature=1.0 if sampling.greedy else sampling.temperature)


def _greatest_logit(outputs: ForwardOutputs) -> float:
    """That of the first row."""
    return float(outputs.logits[0].max() if outputs.candidates is None else outputs.candidates[0].logits.max())


def _favoured(answers: TargetDistributions, count: int) -> list[tuple[int, float]]:
    """The tokens that the text's own random numbers favour after the text, and what speaks for each; best first."""
    outputs, sampling = answers.outputs, answers.sampling
    if outputs.candidates is not None and (found := _favoured_on_device(answers, outputs.candidates[0], count)):
        return found
    if count == 1:
        return [answers.draft(-1)]
    if not sampling.plain_argmax:
        return draft_tokens(answers[-1], answers.noise, "text", answers.position(-1), count)
    row = float_row(outputs.logits[0])
    best, weights = largest(row, count), np.exp(row - row.max())
    tokens = best if outputs.token_ids is None else outputs.token_ids.cpu().numpy()[best]
    return list(zip(tokens.tolist(), (weights[best] / weights.sum()).tolist(), strict=True))


def _favoured_on_device(
    answers: TargetDistributions, candidates: Candidates, count: int
) -> list[tuple[int, float]] | None:
    """The same by what a GPU has found; None where that cannot tell."""
    outputs, sampling = answers.outputs, answers.sampling
    if sampling.greedy:
        best = np.lexsort((candidates.tokens, -candidates.logits))[:count]
        tokens, gaps = candidates.tokens[best], candidates.logits[best] - candidates.logits[best[0]]
        ids = tokens if outputs.token_ids is None else outputs.token_ids.cpu().numpy()[tokens]
        return list(zip(ids.tolist(), (np.exp(gaps) / candidates.total).tolist(), strict=True))
    likely = truncated_distribution(candidates, sampling) if outputs.token_ids is None else None
    if likely is None:
        return None
    found = draft_tokens(likely, answers.noise, "text", answers.position(-1), count)
    # Without truncation a token that is no candidate may win the race, which the device has run among all.
    is_known = sampling.truncates or (outputs.picked is not None and outputs.picked[0] == found[0][0])
    return found if is_known else None
