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
    text_length: int  # of the longest whole text, by which LongRoPE chooses its angles
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    children: dict[tuple[int, int], int] = field(default_factory=dict)  # node by parent and token
    # (continuation, rows of logits, tokens)
    continuations: list[tuple[int, list[int], list[int]]] = field(default_factory=list)

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
        num_holes = self.text_length - len(self.context)
        return ForwardInputs(continuation(self.context, num_holes), tuple(self.tokens), tuple(self.parents))

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
    long_rope = getattr(network, "long_rope", None)
    is_long = long_rope.is_long if long_rope is not None else lambda length: False
    sequences = [
        SequenceState(_scoring_generator(order[start : start + share], pairs, max_nodes, is_long, scores, on_score))
        for start in range(0, len(order), share)
    ]
    for _ in run_batch(sequences, {"target": network}):
        pass
    return scores


def _scoring_generator(
    order: Sequence[int],
    pairs: Sequence[Pair],
    max_nodes: int,
    is_long: Callable[[int], bool],
    scores: Sequence[ContinuationScore],
    on_score: Callable | None,
) -> DecodeGenerator:
    """Yield one tree after another, and add up the scores."""
    for tree, complete in _continuation_trees(order, pairs, max_nodes, is_long):
        tree.add_scores((yield tree.forward_inputs()), scores)
        if on_score is not None:
            for owner in complete:
                on_score(owner, scores[owner])


def _continuation_trees(
    order: Sequence[int], pairs: Sequence[Pair], max_nodes: int, is_long: Callable[[int], bool]
) -> Iterator[tuple[ContinuationTree, list[int]]]:
    """Trees of at most `max_nodes` nodes, each with the continuations whose scores it completes.

    The texts of a tree are all long or all short, so that the score of none depends on the others.
    """
    tree, complete = None, []
    for owner in order:
        context, tokens = pairs[owner]
        length = len(context) + len(tokens)
        for start in range(0, len(tokens), max_nodes):
            before, piece = [*context, *tokens[:start]], tokens[start : start + max_nodes]
            if tree is not None and (
                before != tree.context
                or len(tree.tokens) + len(piece) - 1 > max_nodes
                or is_long(length) != is_long(tree.text_length)
            ):
                yield tree, complete
                tree, complete = None, []
            tree = tree or ContinuationTree(before, length)
            tree.text_length = max(tree.text_length, length)
            tree.add_continuation(owner, piece)
        complete.append(owner)
    if tree is not None:
        yield tree, complete
