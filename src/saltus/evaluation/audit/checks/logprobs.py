"""Log-probabilities: of the same tokens equal on both sides, and possible in themselves."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from saltus.evaluation.audit.client import Ask, Reply
from saltus.evaluation.audit.context import Audit
from saltus.evaluation.audit.statistics import exchangeability_test
from saltus.evaluation.audit.text_comparison import token_differences
from saltus.evaluation.audit.verdicts import FINDING, SAME, Verdict, not_checked

FLOOR, NOISE_FACTOR = 0.05, 4  # nats; beyond this, and so many times a side's own noise, two answers disagree


def run(audit: Audit) -> Iterator[Verdict]:
    """Their form on each side, and the difference between the sides."""
    if not audit.features.has("logprobs"):
        yield not_checked("logprobs", audit.features.missing["logprobs"])
        return
    asks = [Ask(prompt, audit.settings.max_tokens, logprobs=True) for prompt in audit.prompts]
    on, off = audit.paired_answers(asks, audit.settings.repeats)
    for side, groups in zip(audit.sides, (on, off), strict=True):
        found = [fault for group in groups for reply in group for fault in _form(reply)]
        words = f"{found[0]}" if found else "none is above 0, and none is less likely than what it was preferred to"
        yield Verdict(f"logprobs {side.name}", FINDING if found else SAME, words, examples=found[1:3])
    yield _agreement(on, off)


def _form(reply: Reply) -> Iterator[str]:
    for token in reply.tokens or ():
        if token.logprob > 1e-3:
            yield f"a log-probability is {token.logprob:.3g}, which is above 0"
        if token.top and token.logprob < max(token.top.values()) - 0.5:
            yield f"a greedy token has log-probability {token.logprob:.3g}, another one {max(token.top.values()):.3g}"
        if token.top and sum(map(np.exp, token.top.values())) > 1.01:
            yield "the probabilities of the likeliest tokens are more than 1 together"


def _agreement(on: list[list[Reply]], off: list[list[Reply]]) -> Verdict:
    groups, crossing, within = [], [], []
    pairs = [[*a, *b] for a, b in zip(on, off, strict=True)]
    half = len(on[0])
    for replies in pairs:
        sizes = np.zeros((2 * half, 2 * half))
        for i in range(2 * half):
            for j in range(i + 1, 2 * half):
                found = token_differences(replies[i].tokens or (), replies[j].tokens or ())
                sizes[i, j] = sizes[j, i] = float(np.mean(found)) if found else 0.0
                (crossing if i < half <= j else within).extend(found)
        groups.append(sizes)
    noise = float(np.mean(within)) if within else 0.0
    limit = max(FLOOR, NOISE_FACTOR * noise)
    p_value = exchangeability_test([(sizes > limit).astype(np.int64) for sizes in groups])
    largest = max(crossing, default=0.0)
    mean = float(np.mean(crossing)) if crossing else 0.0
    words = (
        f"of the same tokens they differ by {mean:.2g} nats on average, at most {largest:.2g}; of a side's own repeats"
        f" by {noise:.2g}"
    )
    figures = {"mean_nats": mean, "largest_nats": largest, "own_noise_nats": noise, "tokens": len(crossing)}
    return Verdict("logprobs of both sides", SAME, words, p_value, words + ": they disagree", figures)
