"""Sampled texts: does a seed repeat its text, on both sides alike, and is the distribution the same?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from saltus.core.noise import Noise
from saltus.evaluation.audit.client import Request
from saltus.evaluation.audit.context import Audit
from saltus.evaluation.audit.statistics import energy_test, mcnemar
from saltus.evaluation.audit.verdicts import NOTE, SAME, Verdict, not_checked

SAMPLED_PROMPTS, SAMPLES, SAMPLE_TOKENS = 4, 48, 4  # of each side, for the distribution
DRAWS = 10_000  # of the permutation test
SEEDS_OF_A_PROMPT = 2


def run(audit: Audit) -> Iterator[Verdict]:
    """A seed against itself on each side, a seed across sides, and the law of sampled texts."""
    if audit.features.has("seed"):
        yield from _seeded(audit)
    else:
        yield not_checked("seeds", audit.features.missing["seed"])
    yield _distribution(audit)


def _seeded(audit: Audit) -> Iterator[Verdict]:
    first = audit.settings.seed + 1
    prompts = [*audit.prompts] * SEEDS_OF_A_PROMPT
    requests = [Request(prompt, audit.settings.max_tokens, 1.0, first + n) for n, prompt in enumerate(prompts)]
    on, off = audit.paired_answers(requests, 2)
    repeats = [[one.text == two.text for one, two in side] for side in (on, off)]
    total = len(requests)
    broken = sum(b and not a for a, b in zip(*repeats, strict=True))
    mended = sum(a and not b for a, b in zip(*repeats, strict=True))
    words = (
        f"a seed repeats its text in {sum(repeats[0])} of {total} requests with speculation, {sum(repeats[1])} without"
    )
    status = SAME if all(repeats[0]) and all(repeats[1]) else NOTE
    yield Verdict("seeds repeat their texts", status, words, mcnemar(broken, mended), words)
    equal = sum(one[0].text == other[0].text for one, other in zip(on, off, strict=True))
    words = f"{equal} of {total} seeds give the same text on both sides"
    if equal == total:
        yield Verdict("seeded texts of both sides", SAME, words)
    elif equal < total / 2:
        yield Verdict("seeded texts of both sides", NOTE, words + ": speculation uses other random numbers")
    else:
        yield Verdict("seeded texts of both sides", NOTE, words + "; greedy texts say whether that is rounding")


def _distribution(audit: Audit) -> Verdict:
    """Energy distance between short sampled texts of a few prompts, each with a seed of its own."""
    prompts, base = audit.prompts[:SAMPLED_PROMPTS], 1000 * (audit.settings.seed + 1)
    made: list[np.ndarray] = []
    for number, side in enumerate(audit.sides):
        first = base + number * SAMPLES * len(prompts)
        requests = [
            Request(prompts[n // SAMPLES], SAMPLE_TOKENS, 1.0, first + n) for n in range(SAMPLES * len(prompts))
        ]
        texts = [reply.text for reply in audit.answers(side, requests, audit.settings.clients)]
        made.append(np.array(texts, dtype=object).reshape(len(prompts), SAMPLES))
    groups = np.concatenate(made, axis=1)
    distances = np.array([[[_distance(one, other) for other in group] for one in group] for group in groups])
    draws = Noise(audit.settings.seed).uniforms("permutations", np.arange(DRAWS * groups.size))
    p_value = energy_test(distances, np.argsort(draws.reshape(DRAWS, *groups.shape), axis=2))
    line = f"{SAMPLES * len(prompts)} short samples a side"
    return Verdict(
        "sampled distribution", SAME, f"{line}: no clear difference (p = {p_value:.2g})", p_value,
        f"{line} follow different distributions (p = {p_value:.2g})",
    )  # fmt: skip


def _distance(first: str, second: str) -> float:
    """1 for texts that part at once, less for those that part later (halved by 4 characters), 0 for equal ones."""
    if first == second:
        return 0.0
    common = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 1)
    return 0.5 ** (common / 4)
