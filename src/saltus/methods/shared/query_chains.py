"""Chains of query nodes for any method: their uniforms (PTP), the tokens that they predict, and a draft call."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from saltus.core.canvas import Canvas
from saltus.core.coupling import pick_token
from saltus.core.distributions import Step, TargetDistributions
from saltus.core.forward import NO_TOKEN, TARGET, ForwardInputs, ForwardOutputs, NodeKind
from saltus.core.noise import Noise
from saltus.core.picking import Coupling, Distribution, uniform_interval
from saltus.core.protocols import Drafter
from saltus.core.rules import Rule, reject
from saltus.core.sampling import Sampling, most_likely
from saltus.core.tree import Branch

UniformConditioning = Literal["one-hot", "categorical", "independent"]
"""The uniform that a query is conditioned on: its own token's (O-PTP), the previous token's (C-PTP), or none."""

SOURCE = "ptp"


def query_uniforms(uniforms: Sequence[float], form: UniformConditioning) -> list[float]:
    """The uniform that each query of a chain is conditioned on, as in training; NaN is none (Eq. 5 and 7)."""
    if form == "one-hot":
        return list(uniforms)
    return [math.nan, *(uniforms[:-1] if form == "categorical" else [math.nan] * (len(uniforms) - 1))]


def usable_form(form: UniformConditioning, trained_for: Coupling, sampling: Sampling) -> UniformConditioning:
    """The form of queries: `independent` if the coupling has no uniforms, or is not that of the training."""
    known = sampling.greedy or (sampling.has_uniforms and sampling.coupling == trained_for)
    return form if known else "independent"


def position_uniforms(noise: Noise, sampling: Sampling, positions: np.ndarray, stream: str = "text") -> list[float]:
    """The uniforms that pick the tokens of these positions. Greedy is u = 0, which picks the most likely token."""
    return [0.0] * len(positions) if sampling.greedy else noise.uniforms(stream, positions).tolist()


def with_query_chains(
    inputs: ForwardInputs, chains: Sequence[tuple[int, Sequence[float]]], temperature: float
) -> ForwardInputs:
    """Add chains of queries after nodes (−1: the decided tokens), each query with one uniform or NaN.

    At temperature 0 uniforms choose nothing, so queries have none, in training as here.
    """
    nodes: list[tuple[int, int, NodeKind, float]] = []
    for parent, uniforms in chains:
        for u in uniforms:
            u = u if temperature else math.nan
            kind = NodeKind.MASK_QUERY if math.isnan(u) else NodeKind.UNIFORM_QUERY
            nodes.append((NO_TOKEN, parent, kind, u))
            parent = len(inputs.tokens) + len(nodes) - 1
    return _with_queries(inputs, nodes, temperature)


def with_token_queries(inputs: ForwardInputs, tokens: Sequence[int], temperature: float) -> ForwardInputs:
    """Add a chain of guessed tokens after the decided tokens, for the adapter to correct (Jacobi Forcing)."""
    parents = [-1, *range(len(inputs.tokens), len(inputs.tokens) + len(tokens) - 1)]
    nodes = [(token, parent, NodeKind.TOKEN_QUERY, math.nan) for token, parent in zip(tokens, parents, strict=False)]
    return _with_queries(inputs, nodes, temperature)


def _with_queries(
    inputs: ForwardInputs, nodes: Sequence[tuple[int, int, NodeKind, float]], temperature: float
) -> ForwardInputs:
    """Append query nodes, each (token, parent, kind, uniform)."""
    if not nodes:
        return replace(inputs, temperature=temperature)
    tokens, parents, kinds, uniforms = zip(*nodes, strict=True)
    return replace(
        inputs,
        tokens=inputs.tokens + tokens,
        parents=inputs.parents + parents,
        kinds=(inputs.kinds or (NodeKind.DRAFT_TOKEN,) * len(inputs.tokens)) + kinds,
        uniforms=inputs.uniforms + uniforms,
        temperature=temperature,
    )


def drafts_of_chain(distributions: TargetDistributions, chain: Sequence[int], argmax: bool) -> list[tuple[int, float]]:
    """The tokens that a chain of queries drafts, with their probabilities: argmax (Eq. 5), or the pick from Q (Eq. 7).

    Ends before a query with NaN logits, or without a token that is not banned: a broken adapter drafts nothing and
    cannot break the text.
    """
    drafts = []
    for query in chain:
        token, stated = most_likely(distributions.outputs.logits[query + 1])
        if math.isnan(stated):
            break
        if not argmax:
            try:
                token, stated = distributions.draft(query)
            except ValueError:
                break
        drafts.append((token, stated))
    return drafts


def two_call_drafter(
    noise: Noise,
    sampling: Sampling,
    rule: Rule,
    form: UniformConditioning = "one-hot",
    num_draft_tokens: int = 8,
    drafts: int = 1,
    network_name: str = TARGET,
    source: str = SOURCE,
    argmax: bool = False,
) -> Drafter:
    """Draft by one chain of queries in a call of its own; another call verifies its tokens (Alg. 1).

    Where the queries run on the target itself, the first draft is the target's own pick, since that call computes its
    distribution. A separate draft model predicts that token by its first query. Under `match` the uniforms are the
    text's. Under `reject` they are fresh, the rule gets the draft distributions (so `form` must be one that has
    them), and of several chains (`drafts`) the most central one is taken (Eq. 18). With `argmax` queries of every form
    draft their likeliest token, as those of O-PTP always do.
    """
    argmax = argmax or form == "one-hot"
    if rule is reject and argmax:
        raise ValueError(
            "ptp: the rule reject needs drafts sampled from distributions; use rule='match', or a C-PTP adapter without"
            " argmax"
        )
    if drafts > 1 and rule is not reject:
        raise ValueError("ptp: several drafts need fresh uniforms; use rule='reject', or drafts=1")
    if drafts > 1 and not sampling.has_uniforms:
        raise ValueError(f"ptp: several drafts need uniforms, which {sampling.coupling} has not; use drafts=1")

    def offer(
        canvas: Canvas, last: Step | None, max_depth: int
    ) -> Generator[ForwardInputs, ForwardOutputs, Sequence[Branch]]:
        places = canvas.open_positions[: min(num_draft_tokens, max_depth)]
        streams = [f"{source}/{canvas.num_decided}/{i}" for i in range(drafts)] if rule is reject else ["text"]
        groups = [position_uniforms(noise, sampling, places, stream) for stream in streams]
        conditioning = [(-1, query_uniforms(group, form)) for group in groups]
        inputs = with_query_chains(ForwardInputs(canvas, network_name=network_name), conditioning, sampling.temperature)
        distributions = TargetDistributions(inputs, (yield inputs), sampling, noise)
        branches = []
        for number, stream in enumerate(streams):
            chain = range(number * len(places), (number + 1) * len(places))
            sampled_by = stream if rule is reject else None
            branches.append(_branch(distributions, chain, argmax, sampled_by, network_name == TARGET, source))
        if drafts == 1:
            return branches
        return [branches[most_central([_branch_offsets(*pair) for pair in zip(groups, branches, strict=True)])]]

    return offer


def _branch(
    distributions: TargetDistributions,
    chain: Sequence[int],
    argmax: bool,
    sampled_by: str | None,
    known: bool,
    source: str,
) -> Branch:
    """The drafts of one chain after the decided tokens; with `known` the first token is the target's own pick.

    With `sampled_by` the drafts are sampled with the random numbers of this stream.
    """
    if sampled_by is not None:
        nodes = [-1, *chain[1:]] if known else list(chain)
        drawn_from = [distributions[node] for node in nodes]
        tokens = [
            pick_token(distribution, distributions.noise, sampled_by, distributions.position(node))
            for node, distribution in zip(nodes, drawn_from, strict=True)
        ]
        probabilities = [distribution.peak for distribution in drawn_from]  # must not depend on the tokens
        return Branch(tokens, [1.0, *probabilities[1:]] if known else probabilities, source, drawn_from)
    tokens, probabilities = ([distributions.pick(-1)], [1.0]) if known else ([], [])
    for token, chance in drafts_of_chain(distributions, chain[known:], argmax):
        tokens.append(token)
        probabilities.append(chance)
    return Branch(tokens, probabilities, source)


def offset(u: float, token: int, distribution: Distribution) -> float:
    """Where u lies in its token's interval: 0 at the low end, 1 at the high; uniform, whatever the token."""
    low, high = uniform_interval(token, distribution)
    return (u - low) / (high - low) if high > low else 0.5


def most_central(offsets: Sequence[Sequence[float]]) -> int:
    """The index of the draft whose uniforms lie closest to the middle of their intervals (Eq. 18).

    The paper prints argmax over the distance from the middle, but its text describes argmin. Offsets are independent
    of the tokens, so this choice leaves their distribution unchanged; choosing by the number of correct tokens would
    not.
    """
    distances = [sum(abs(place - 0.5) for place in draft) for draft in offsets]
    return min(range(len(distances)), key=distances.__getitem__)


def _branch_offsets(uniforms: Sequence[float], branch: Branch) -> list[float]:
    assert branch.distributions is not None
    return [offset(*draft) for draft in zip(uniforms, branch.tokens, branch.distributions, strict=True)]
