"""Find what is wrong with a draft before it is decoded: other types or lengths than a branch or tree must have."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from saltus.core.picking import Distribution
from saltus.core.tree import Branch, DraftNodes, Drafts
from saltus.core.value_types import short_repr

LEAST, GREATEST = -0.01, 1.01  # of a probability: it may be rounded to bfloat16
BRANCH_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "tokens": (lambda token: operator.index(token) >= 0, "token ids"),
    "acceptance_probabilities": (lambda each: LEAST <= each <= GREATEST, "numbers from 0 to 1"),
    "distributions": (lambda each: isinstance(each, Distribution), "Distribution"),
    "payoffs": (math.isfinite, "numbers"),
}
"""The fields of a branch with a value for each token, what each value must be, and that in words."""
OPTIONAL_FIELDS = {"distributions", "payoffs"}
NODE_ARRAYS = {"tokens": np.int64, "parents": np.int64, "acceptance_probabilities": np.float64}
"""The arrays of `DraftNodes`, and the types of their numbers."""


def draft_fault(draft: Drafts, vocab: int | None = None) -> str:
    """What is wrong with a draft for a vocabulary of so many tokens, and what to give instead; empty if nothing is."""
    if not isinstance(draft.source, str):
        return f"its source is {short_repr(draft.source)}; give a text, such as the name of the method"
    if fault := _nodes_fault(draft) if isinstance(draft, DraftNodes) else _branch_fault(draft):
        return fault
    if vocab is not None and len(draft.tokens) and max(draft.tokens) >= vocab:
        return (
            f"its tokens are {short_repr(draft.tokens)}; the model's vocabulary has {vocab:,}, so give ids below that"
        )
    return ""


def _branch_fault(branch: Branch) -> str:
    for name, (fits, described) in BRANCH_FIELDS.items():
        if name in OPTIONAL_FIELDS and getattr(branch, name) is None:
            continue
        values = getattr(branch, name)
        if not _all_fit(values, fits):
            return f"its {name} are {short_repr(values)}; give a list of {described}"
        if len(values) != len(branch.tokens):
            return f"it has {len(branch.tokens)} tokens, but {len(values)} {name}; give one for each token"
    return ""


def _all_fit(values: Any, fits: Callable[[Any], bool]) -> bool:
    try:
        return not isinstance(values, str | bytes) and all(map(fits, values))
    except TypeError:
        return False


def _nodes_fault(nodes: DraftNodes) -> str:
    for name, dtype in NODE_ARRAYS.items():
        values = getattr(nodes, name)
        right = isinstance(values, np.ndarray) and values.dtype == dtype and values.flags.c_contiguous
        if not right or values.shape != (nodes.tokens.size,):
            return f"its {name} are {short_repr(values)}; give an array of {dtype.__name__}, a number for each node"
    if min(nodes.tokens.tolist(), default=0) < 0:
        return f"its tokens are {short_repr(nodes.tokens)}; give token ids"
    if not all(LEAST <= each <= GREATEST for each in nodes.acceptance_probabilities.tolist()):
        return (
            f"its acceptance_probabilities are {short_repr(nodes.acceptance_probabilities)}; give numbers from 0 to 1"
        )
    if any(parent >= node for node, parent in enumerate(nodes.parents.tolist())):
        return f"its parents are {short_repr(nodes.parents)}; give −1, or the number of an earlier node"
    return ""
