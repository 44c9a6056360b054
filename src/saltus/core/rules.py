"""Verify draft tokens: accept those that the text's own random numbers pick, or use rejection sampling."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from saltus.core.coupling import pick_token
from saltus.core.distributions import TargetDistributions
from saltus.core.forward import ForwardInputs
from saltus.core.native_walk import followed_tokens
from saltus.core.picking import one_hot, probability, residual, sample

Rule = Callable[[ForwardInputs, TargetDistributions], tuple[np.ndarray, int]]
"""Returns the decided tokens (int64, at least one, at most all open ones) and the last accepted node (−1: none)."""


def match(inputs: ForwardInputs, distributions: TargetDistributions) -> tuple[np.ndarray, int]:
    """Walk the tree with the text's own random numbers: accept what they would have picked anyway (PTP, Alg. 1).

    Greedy decoding is the same rule, since the pick from a one-hot distribution is the argmax. Exact for any tree: the
    text is a function of the seed alone.
    """
    tokens, node, is_complete = followed_tokens(distributions)
    for _ in inputs.canvas.open_positions[len(tokens) :] if not is_complete else ():
        try:
            token = distributions.pick(node)
        except ValueError:  # no token may follow: the text ended before, or the next call finds that it cannot go on
            if not tokens:
                raise
            return np.array(tokens, dtype=np.int64), inputs.parents[node]
        tokens.append(token)
        child = next((i for i in inputs.children(node) if inputs.tokens[i] == token), None)
        if child is None:
            break
        node = child
        if distributions.ends_hole(tokens):
            break
    return np.array(tokens, dtype=np.int64), node


def reject(inputs: ForwardInputs, distributions: TargetDistributions) -> tuple[np.ndarray, int]:
    """Accept a draft token with min(1, P/Q), else sample from the residual (Leviathan et al. 2023, Alg. 1).

    Siblings are tried in turn, each against the residual that the ones before it left. This keeps the target's
    distribution as long as each token was sampled from its own Q and no draft was dropped because of its token.
    """
    node, tokens = -1, []
    for position in inputs.canvas.open_positions:
        try:
            target = distributions[node]
        except ValueError:  # as in `match`
            if not tokens:
                raise
            return np.array(tokens, dtype=np.int64), inputs.parents[node]
        for sibling, child in enumerate(inputs.children(node)):
            token = inputs.tokens[child]
            draft = (inputs.draft_distributions[child] if inputs.draft_distributions else None) or one_hot(token)
            u = distributions.noise.uniform(f"accept/{sibling}", position)
            if u * probability(token, draft) < probability(token, target):
                tokens.append(token)
                node = child
                break
            target = residual(target, draft)
        else:
            if inputs.num_draft_tokens:
                tokens.append(sample(distributions.noise.uniform("text", position), target))
            else:  # the token that `match` picks
                tokens.append(pick_token(target, distributions.noise, "text", position))
            break
        if distributions.ends_hole(tokens):
            break
    return np.array(tokens, dtype=np.int64), node


RULES: dict[str, Rule] = {"match": match, "reject": reject}
