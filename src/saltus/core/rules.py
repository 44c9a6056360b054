"""Decide which drafted tokens become text: by the text's own uniforms, or by rejection. Nothing else decides."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from saltus.core.forward import Forward, Laws
from saltus.core.sampling import draw, one_hot, pick, probability, residual

Rule = Callable[[Forward, Laws], tuple[np.ndarray, int]]


def match(asked: Forward, laws: Laws) -> tuple[np.ndarray, int]:
    """Walk the tree with the text's own uniforms: accept what Pick would have written anyway (PTP, Alg. 1).

    Greedy is the same rule, since Pick from a one-hot law is the argmax. Exact for any tree: the text is a
    function of the seed alone. Returns the decided tokens and the last accepted node.
    """
    node, tokens = -1, []
    for _ in asked.canvas.open:
        token = laws.pick(node)
        tokens.append(token)
        child = next((i for i in asked.children(node) if asked.tokens[i] == token), None)
        if child is None:
            break
        node = child
        if laws.closes(tokens):
            break
    return np.array(tokens, dtype=np.int64), node


def reject(asked: Forward, laws: Laws) -> tuple[np.ndarray, int]:
    """Accept a drafted token with min(1, P/Q), else go on with the residual law (Leviathan et al. 2023, Alg. 1).

    Siblings are tried in turn, each against what the ones before it left over, which stays exact in law as long
    as each token was drawn from its own Q and no draft was dropped for the token that it drew.
    """
    node, tokens = -1, []
    for position in asked.canvas.open:
        target = laws[node]
        for sibling, child in enumerate(asked.children(node)):
            token = asked.tokens[child]
            draft = (asked.drafted[child] if asked.drafted else None) or one_hot(token)
            u = laws.noise.one(f"accept/{sibling}", position)
            if u * probability(token, draft) < probability(token, target):
                tokens.append(token)
                node = child
                break
            target = residual(target, draft)
        else:
            u = laws.noise.one("text", position)
            tokens.append(draw(u, target) if asked.drafts else pick(u, target))  # without drafts as `match` does
            break
        if laws.closes(tokens):
            break
    return np.array(tokens, dtype=np.int64), node


RULES: dict[str, Rule] = {"match": match, "reject": reject}
