"""Count what each drafter offered for each call, what of it was accepted, and how true its probabilities are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from saltus.core.forward import ForwardInputs
from saltus.core.tree import each_branch

NUM_BINS = 10  # of stated probabilities, equally wide
UNNAMED = "unnamed"
ROUNDING = 1e-3  # of probabilities that were added up in float32

Paths = dict[tuple[int, ...], float]
"""Offered tokens, each as the tokens from the decided ones to it, with the probability that is stated for it."""


@dataclass(frozen=True)
class DraftCounts:
    """What a drafter offered for one call; the fields are keys of records.jsonl.

    A token after the same tokens counts once for each drafter that offered it.
    """

    offered: list[int]  # tokens by depth, those directly after the decided ones first
    verified: list[int]  # those of them that the call verified
    accepted: int  # those of them that were accepted, one at each depth


@dataclass(frozen=True)
class AcceptanceHistogram:
    """Of the tokens whose acceptance is known, by bins of the probability stated; fields are keys of records.jsonl."""

    offered: list[int] = field(default_factory=lambda: [0] * NUM_BINS)
    accepted: list[int] = field(default_factory=lambda: [0] * NUM_BINS)
    stated: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)  # sums of the probabilities

    def add(self, stated: float, accepted: bool) -> None:
        place = min(int(stated * NUM_BINS), NUM_BINS - 1)
        self.offered[place] += 1
        self.accepted[place] += accepted
        self.stated[place] += stated


def count_drafts(
    inputs: ForwardInputs, decided: Sequence[int], histograms: dict[str, AcceptanceHistogram]
) -> dict[str, DraftCounts]:
    """The counts of each drafter that offered tokens for a call that decided these; its histogram is added to.

    A token's acceptance is known if the tokens before it were accepted. It need not have been verified: the token
    decided in its place tells. Of sampled drafts, which rejection sampling verifies, it must have been.
    """
    tree, counts = _verified_paths(inputs), {}
    sampled = any(branch.distributions for branch in each_branch(inputs.drafts))
    for name, paths in _offered_paths(inputs).items():
        verified = tree & paths.keys()
        accepted = sum(tuple(decided[: depth + 1]) in verified for depth in range(len(decided)))
        counts[name] = DraftCounts(_by_depth(paths), _by_depth(verified), accepted)
        histogram = histograms.setdefault(name, AcceptanceHistogram())
        for path in verified if sampled else paths:
            *before, token = path
            if len(before) < len(decided) and before == list(decided[: len(before)]):
                histogram.add(paths[path], decided[len(before)] == token)
    return counts


def _offered_paths(inputs: ForwardInputs) -> Mapping[str, Paths]:
    """By drafter. Of several probabilities for a token the greatest counts, as in the tree. Errors: ValueError."""
    by_drafter: dict[str, Paths] = {}
    for branch in each_branch(inputs.drafts):
        name = branch.source.partition("/")[0] or UNNAMED
        paths = by_drafter.setdefault(name, {})
        path: tuple[int, ...] = ()
        for token, stated in zip(branch.tokens, branch.acceptance_probabilities, strict=True):
            if not -ROUNDING <= stated <= 1 + ROUNDING:
                raise ValueError(f"{name} stated {stated:g} as the probability of a draft token; it must lie in [0, 1]")
            path = (*path, int(token))
            paths[path] = max(paths.get(path, 0.0), float(stated))
    return {name: paths for name, paths in by_drafter.items() if paths}


def _verified_paths(inputs: ForwardInputs) -> set[tuple[int, ...]]:
    return {tuple(inputs.path_tokens(node)) for node in range(inputs.num_draft_tokens)}


def _by_depth(paths: Mapping[tuple[int, ...], float] | set[tuple[int, ...]]) -> list[int]:
    counted = Counter(map(len, paths))
    return [counted[depth] for depth in range(1, max(counted, default=0) + 1)]
