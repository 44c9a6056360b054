"""Log-probabilities: of the same tokens equal on both sides, and possible in themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from saltus.evaluation.audit.client import Reply, Request, Side, curl_line
from saltus.evaluation.audit.context import Audit
from saltus.evaluation.audit.statistics import exchangeability_test
from saltus.evaluation.audit.text_comparison import token_differences
from saltus.evaluation.audit.verdicts import FINDING, NOTE, SAME, Verdict, not_checked

FLOOR, NOISE_FACTOR = 0.05, 4  # nats; beyond this, and so many times a side's own noise, two answers disagree
PREFERRED, BARE = "preferred", "bare"  # faults that a server's settings may explain if both sides have them


def run(audit: Audit) -> Iterator[Verdict]:
    """Their form on each side, and the difference between the sides."""
    if not audit.features.has("logprobs"):
        yield not_checked("logprobs", audit.features.missing["logprobs"])
        return
    requests = [Request(prompt, audit.settings.max_tokens, logprobs=True) for prompt in audit.prompts]
    on, off = audit.paired_answers(requests, audit.settings.repeats)
    faults = [
        [fault for request, group in zip(requests, side, strict=True) for fault in _form(request, group)]
        for side in (on, off)
    ]
    for side, own, other in zip(audit.sides, faults, reversed(faults), strict=True):
        yield _form_verdict(side, own, shared={PREFERRED, BARE} & {fault.kind for fault in other})
    yield _agreement(on, off)


@dataclass(frozen=True)
class _Fault:
    kind: str
    words: str
    request: Request


def _form_verdict(side: Side, faults: Sequence[_Fault], shared: set[str]) -> Verdict:
    name, ranked = f"logprobs {side.name}", sorted(faults, key=lambda fault: fault.kind in shared)
    if not ranked:
        return Verdict(name, SAME, "none is above 0, and none is less likely than what it was preferred to")
    first, words = ranked[0], list(dict.fromkeys(fault.words for fault in ranked))
    if first.kind in shared:
        return Verdict(name, NOTE, f"{words[0]}; on the other side, too, so not by speculation", examples=words[1:3])
    return Verdict(name, FINDING, words[0], examples=words[1:3], repeat=[curl_line(side, first.request)])


def _form(request: Request, replies: Sequence[Reply]) -> Iterator[_Fault]:
    for token in (token for reply in replies for token in reply.tokens or ()):
        if token.logprob > 1e-3:
            yield _Fault("above 0", f"a log-probability is {token.logprob:.3g}, which is above 0", request)
        if token.top and token.logprob < max(token.top.values()) - 0.5:
            words = f"a greedy token has log-probability {token.logprob:.3g}, another one {max(token.top.values()):.3g}"
            yield _Fault(PREFERRED, words, request)
        if token.top and sum(map(np.exp, token.top.values())) > 1.01:
            yield _Fault("sum", "the probabilities of the likeliest tokens are more than 1 together", request)
    for reply in replies:
        tokens = reply.tokens or ()
        bare = [token for token in tokens if not token.top]
        if bare and len(bare) < len(tokens):
            zero = sum(token.logprob == 0 for token in bare)
            words = f"{len(bare)} of {len(tokens)} tokens of an answer lack the likeliest tokens that were asked for"
            yield _Fault(BARE, words + (f", and {zero} have log-probability 0" if zero else ""), request)


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
