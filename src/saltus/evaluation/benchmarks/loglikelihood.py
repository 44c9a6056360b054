"""Score continuations by a network: continuations of one context form a tree, and shared prefixes are read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from saltus.core.batch import SequenceState, run_batch
from saltus.core.canvas import continuation
from saltus.core.distributions import DecodeGenerator
from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.core.protocols import Network

MAX_NODES_PER_CALL, MIN_NODES_PER_TEXT = 200, 24  # nodes of one batched call, and of one text in it

Pair = tuple[Sequence[int], Sequence[int]]
"""The tokens of a context and of its continuation; neither is empty."""


@dataclass
class ContinuationScore:
    """The log-likelihood of a continuation."""

    log_likelihood: float = 0.0  # natural logarithm, summed over its tokens
    is_greedy: bool = True  # True if greedy decoding would give it


@dataclass
class ContinuationTree:
    """Continuations of one context as a tree; common prefixes share nodes."""

    context: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    children: dict[tuple[int, int], int] = field(default_factory=dict)  # node by parent and token
    continuations: list[tuple[int, list[int], list[int]]] = field(
        default_factory=list
    )  # (continuation, rows of logits, tokens)

    def add_continuation(self, index: int, tokens: Sequence[int]) -> None:
        """Add a continuation. Its last token is scored but needs no node, since nothing follows it."""
        node, rows = -1, [0]
        for token in tokens[:-1]:
            child = self.children.setdefault((node, token), len(self.tokens))
            if child == len(self.tokens):
                self.tokens.append(token)
                self.parents.append(node)
            node = child
            rows.append(node + 1)
        self.continuations.append((index, rows, list(tokens)))

    def forward_inputs(self) -> ForwardInputs:
        return ForwardInputs(continuation(self.context, 1), tuple(self.tokens), tuple(self.parents))

    def add_scores(self, outputs: ForwardOutputs, scores: Sequence[ContinuationScore]) -> None:
        """Add log-softmax values (float32, summed in float64) of a call to the scores of its continuations."""
        logits = outputs.logits.float()
        # row by row, so that a score does not depend on the other rows of the call
        best, total = logits.argmax(-1), torch.stack([row.logsumexp(-1) for row in logits])
        for owner, rows, tokens in self.continuations:
            at, token = torch.tensor([rows, tokens], device=logits.device)
            score = scores[owner]
            score.log_likelihood += float((logits[at, token] - total[at]).double().sum())
            score.is_greedy &= bool((best[at] == token).all())


def score_continuations(
    network: Network,
    pairs: Sequence[Pair],
    batch_size: int = 1,
    on_score: Callable[[int, ContinuationScore], Any] | None = None,
) -> list[ContinuationScore]:
    """The score of each continuation after its context; `on_score(index, score)` is called as each is known.

    Texts are read in the order of their tokens, so that one KV cache serves all with a common prefix; `batch_size`
    such caches are used in each call. A continuation that is too long for a call is scored in pieces.
    """
    max_nodes = max(MAX_NODES_PER_CALL // batch_size, MIN_NODES_PER_TEXT)
    order = sorted(range(len(pairs)), key=lambda i: (*pairs[i][0], *pairs[i][1]))
    scores = [ContinuationScore() for _ in pairs]
    share = -(-len(order) // batch_size) or 1
    sequences = [
        SequenceState(_scoring_generator(order[start : start + share], pairs, max_nodes, scores, on_score))
        for start in range(0, len(order), share)
    ]
    for _ in run_batch(sequences, {"target": network}):
        pass
    return scores


def _scoring_generator(
    order: Sequence[int],
    pairs: Sequence[Pair],
    max_nodes: int,
    scores: Sequence[ContinuationScore],
    on_score: Callable | None,
) -> DecodeGenerator:
    """Yield one tree after another, and add up the scores."""
    for tree, complete in _continuation_trees(order, pairs, max_nodes):
        tree.add_scores((yield tree.forward_inputs()), scores)
        if on_score is not None:
            for owner in complete:
                on_score(owner, scores[owner])


def _continuation_trees(
    order: Sequence[int], pairs: Sequence[Pair], max_nodes: int
) -> Iterator[tuple[ContinuationTree, list[int]]]:
    """Trees of at most `max_nodes` nodes, each with the continuations whose scores it completes."""
    tree, complete = None, []
    for owner in order:
        context, tokens = pairs[owner]
        for start in range(0, len(tokens), max_nodes):
            before, piece = [*context, *tokens[:start]], tokens[start : start + max_nodes]
            if tree is not None and (before != tree.context or len(tree.tokens) + len(piece) - 1 > max_nodes):
                yield tree, complete
                tree, complete = None, []
            tree = tree or ContinuationTree(before)
            tree.add_continuation(owner, piece)
        complete.append(owner)
    if tree is not None:
        yield tree, complete
