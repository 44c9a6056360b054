"""Draft with groups of auxiliary queries: what they are told, what they say, and a call of their own (PTP, Alg. 1)."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from saltus.core.canvas import Canvas
from saltus.core.decode import Drafter
from saltus.core.forward import AUXILIARY, TARGET, Forward, Laws, Reply, Step
from saltus.core.noise import Noise
from saltus.core.rules import Rule, reject
from saltus.core.sampling import Law, Sampling, interval, likeliest, pick, probability
from saltus.core.tree import Branch

Form = Literal["one-hot", "categorical", "independent"]
"""What a query is given: the uniform of its own token (O-PTP), of the token before (C-PTP), or none (no PTP)."""

SOURCE = "ptp"


def given(uniforms: Sequence[float], form: Form) -> list[float]:
    """What each query of a group is told, as in training; NaN is none (Eq. 5 and 7)."""
    if form == "one-hot":
        return list(uniforms)
    return [math.nan, *(uniforms[:-1] if form == "categorical" else [math.nan] * (len(uniforms) - 1))]


def uniforms_of(noise: Noise, sampling: Sampling, positions: np.ndarray, stream: str = "text") -> list[float]:
    """The uniforms that pick the tokens of these positions. Greedy is u = 0, which picks the likeliest token."""
    return [0.0] * len(positions) if sampling.greedy else noise.at(stream, positions).tolist()


def with_groups(asked: Forward, groups: Sequence[tuple[int, Sequence[float]]], temperature: float) -> Forward:
    """Hang groups of queries behind nodes (−1: the decided text); each query is told one uniform or NaN.

    At temperature 0 uniforms choose nothing, and none is told, in training as here.
    """
    tokens, parents = list(asked.tokens), list(asked.parents)
    told: list[float | None] = [None] * len(tokens)
    for at, group in groups:
        for u in group:
            tokens.append(AUXILIARY)
            parents.append(at)
            told.append(u if temperature else math.nan)
            at = len(tokens) - 1
    return replace(asked, tokens=tuple(tokens), parents=tuple(parents), uniforms=tuple(told), temperature=temperature)


def with_guesses(asked: Forward, guesses: Sequence[int], temperature: float) -> Forward:
    """Hang guesses behind the decided text, one behind the other, for the adapter to read (Jacobi Forcing)."""
    nodes = len(asked.tokens)
    return replace(
        asked,
        tokens=(*asked.tokens, *guesses),
        parents=(*asked.parents, -1, *range(nodes, nodes + len(guesses) - 1)),
        uniforms=(*([None] * nodes), *([math.nan] * len(guesses))),
        temperature=temperature,
    )


def said(laws: Laws, chain: Sequence[int], form: Form, uniforms: Sequence[float]) -> list[tuple[int, float]]:
    """The tokens that queries draft, and the chances that they state: the argmax (Eq. 5), or Pick(u, law) (Eq. 7).

    Ends before a query whose logits are no numbers: a broken adapter drafts nothing, and breaks no text.
    """
    drafts = []
    for query, u in zip(chain, uniforms, strict=False):
        token, chance = likeliest(laws.reply.logits[query + 1])
        if math.isnan(chance):
            break
        if form != "one-hot":
            token = pick(u, laws[query])
            chance = probability(token, laws[query])
        drafts.append((token, chance))
    return drafts


def in_two_calls(
    noise: Noise,
    sampling: Sampling,
    rule: Rule,
    form: Form = "one-hot",
    length: int = 8,
    drafts: int = 1,
    to: str = TARGET,
    source: str = SOURCE,
) -> Drafter:
    """Ask a group behind the decided text, then let its tokens be verified (Alg. 1); at most `length` drafts.

    Where the target itself is asked, the first draft is its own pick: the call that drafts knows its law. A student of
    its own, `to`, says that token by its first query. Under `match` the uniforms are the text's. Under `reject` they
    are fresh, the laws that drafts are drawn from are told to the rule (so the form must be one that has laws), and of
    several groups, `drafts`, the most central is taken (Eq. 18).
    """
    if rule is reject and form == "one-hot":
        raise ValueError("ptp: the rule reject needs drafts drawn from laws; use rule='match', or a C-PTP adapter")
    if drafts > 1 and rule is not reject:
        raise ValueError("ptp: several drafts need uniforms that are free; use rule='reject', or drafts=1")

    def offer(canvas: Canvas, last: Step | None, room: int) -> Generator[Forward, Reply, Sequence[Branch]]:
        places = canvas.open[: min(length, room)]
        streams = [f"{source}/{canvas.done}/{i}" for i in range(drafts)] if rule is reject else ["text"]
        groups = [uniforms_of(noise, sampling, places, stream) for stream in streams]
        told = [(-1, given(group, form)) for group in groups]
        asked = with_groups(Forward(canvas, to=to), told, sampling.temperature)
        laws = Laws(asked, (yield asked), sampling, noise)
        branches = []
        for number, uniforms in enumerate(groups):
            chain = range(number * len(places), (number + 1) * len(places))
            branches.append(_branch(laws, chain, uniforms, form, rule is reject, to == TARGET, source))
        if drafts == 1:
            return branches
        return [branches[most_central([_offsets(*one) for one in zip(groups, branches, strict=True)])]]

    return offer


def _branch(
    laws: Laws,
    chain: Sequence[int],
    uniforms: Sequence[float],
    form: Form,
    drawn: bool,
    known: bool,
    source: str,
) -> Branch:
    """What a group behind the decided text drafts; is the first token known, as the target's own?"""
    own = [laws[query] for query in ([-1, *chain[1:]] if known else chain)] if drawn else None
    if own is not None:
        tokens = [pick(u, law) for u, law in zip(uniforms, own, strict=True)]
        chances = [law.peak for law in own]  # not to depend on the tokens
        return Branch(tokens, [1.0, *chances[1:]] if known else chances, source, own)
    tokens, chances = ([laws.pick(-1)], [1.0]) if known else ([], [])
    for token, chance in said(laws, chain[known:], form, uniforms[known:]):
        tokens.append(token)
        chances.append(chance)
    return Branch(tokens, chances, source)


def offset(u: float, token: int, law: Law) -> float:
    """Where u lies in its token's interval: 0 at the low end, 1 at the high; uniform, whatever the token."""
    low, high = interval(token, law)
    return (u - low) / (high - low) if high > low else 0.5


def most_central(offsets: Sequence[Sequence[float]]) -> int:
    """Which of several drafts to take: the one whose uniforms lie closest to the middle of their intervals (Eq. 18).

    The paper prints argmax over the distance from the middle; its text, and the sense, say argmin. Offsets are
    independent of the tokens, so choosing by them leaves the law of the tokens as it is; choosing by how many
    tokens were right would not.
    """
    distances = [sum(abs(one - 0.5) for one in draft) for draft in offsets]
    return min(range(len(distances)), key=distances.__getitem__)


def _offsets(uniforms: Sequence[float], branch: Branch) -> list[float]:
    assert branch.laws is not None
    return [offset(*one) for one in zip(uniforms, branch.tokens, branch.laws, strict=True)]
