"""Restrict a text to what a grammar allows, and draft what it leaves no choice about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from saltus.core.tree import Branch, Drafts, each_branch

SOURCE = "grammar"
FAST_FORWARD_PROBABILITY = 0.9  # that the target takes such a token: it may write the same characters in other tokens


@runtime_checkable
class Constraint(Protocol):
    """Which tokens a continuation may have next. A text is the tokens after the prompt.

    What it answers depends on the text alone, whatever it was asked before.
    """

    def allowed(self, text: Sequence[int]) -> Bool[np.ndarray, "vocab"] | None:
        """The tokens that may follow; None if all may, as after a text that has ended.

        Errors: ValueError for a text that is forbidden, and where nothing may follow.
        """
        ...

    def num_allowed(self, text: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of the tokens may follow the text, one after the other."""
        ...

    def fast_forward(self, text: Sequence[int], max_tokens: int) -> Sequence[int]:
        """The usual tokens of the characters that must come next, at most `max_tokens` of them."""
        ...


def restricted(row: Float[Tensor, "logits"], allowed: Bool[np.ndarray, "vocab"] | None) -> Float[Tensor, "logits"]:
    """Logits on the CPU, −∞ for tokens that are not allowed; also for those beyond the vocabulary.

    Errors: ValueError where no token of the vocabulary is allowed.
    """
    if allowed is None:
        return row
    row = row.cpu()  # for what reads it, whether it is masked before or after
    masked = torch.full_like(row, -torch.inf)
    places = torch.from_numpy(np.flatnonzero(allowed[: len(row)]))
    if not len(places):
        raise ValueError("the constraint allows none of the model's tokens; give it another one")
    masked[places] = row[places]
    return masked


def constrained_branches(
    drafts: Sequence[Drafts], constraint: Constraint, text: Sequence[int], max_depth: int
) -> list[Branch]:
    """Branches up to the first token that is not allowed, and what the grammar dictates after the text and after each.

    Such fast-forward tokens end at a depth of `max_depth`, since a grammar may force more than a call verifies.
    Sampled branches (with `distributions`) stay as they are, since `reject` must try what was sampled.
    """
    constrained: list[Branch] = []
    ends: dict[tuple[int, ...], None] = {(): None}
    for branch in each_branch(drafts):
        if branch.distributions is None:
            count = constraint.num_allowed(text, branch.tokens)
            payoffs = None if branch.payoffs is None else branch.payoffs[:count]
            branch = Branch(
                branch.tokens[:count], branch.acceptance_probabilities[:count], branch.source, None, payoffs
            )
            ends[tuple(branch.tokens)] = None
        constrained.append(branch)
    for end in ends:
        if len(end) < max_depth and len(tokens := constraint.fast_forward([*text, *end], max_depth - len(end))):
            # The tokens up to there keep the probabilities of their own drafter.
            chances = [*[0.0] * len(end), *[FAST_FORWARD_PROBABILITY] * len(tokens)]
            constrained.append(Branch((*end, *tokens), chances, SOURCE))
    return constrained
