"""Score continuations under a network: those of one context hang from it as a tree; what texts share is read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from saltus.core.canvas import continuation
from saltus.core.decode import Network, Seat, rounds
from saltus.core.forward import Forward, Reply, Writer

ROOM, LEAST = 200, 24  # nodes of a round of calls, and of one text in it

Pair = tuple[Sequence[int], Sequence[int]]
"""The tokens of a context and of its continuation; neither is empty."""


@dataclass
class Score:
    """What the network thinks of a continuation."""

    log_likelihood: float = 0.0  # natural logarithm, summed over its tokens
    greedy: bool = True  # would greedy decoding have written it?


@dataclass
class Tree:
    """Continuations of one context; those that begin alike share nodes."""

    context: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    children: dict[tuple[int, int], int] = field(default_factory=dict)  # node by parent and token
    hung: list[tuple[int, list[int], list[int]]] = field(default_factory=list)  # whose, rows of logits, their tokens

    def hang(self, owner: int, tokens: Sequence[int]) -> None:
        """Add a continuation. Its last token is scored, but nothing follows it, so it needs no node."""
        node, rows = -1, [0]
        for token in tokens[:-1]:
            child = self.children.setdefault((node, token), len(self.tokens))
            if child == len(self.tokens):
                self.tokens.append(token)
                self.parents.append(node)
            node = child
            rows.append(node + 1)
        self.hung.append((owner, rows, list(tokens)))

    def asked(self) -> Forward:
        return Forward(continuation(self.context, 1), tuple(self.tokens), tuple(self.parents))

    def add(self, reply: Reply, scores: Sequence[Score]) -> None:
        """Add what the reply says to the scores of the owners. Log-softmax is taken in float32."""
        logits = reply.logits.float()
        best, total = logits.argmax(-1), logits.logsumexp(-1)
        for owner, rows, tokens in self.hung:
            at, token = torch.tensor([rows, tokens], device=logits.device)
            score = scores[owner]
            score.log_likelihood += float((logits[at, token] - total[at]).sum())
            score.greedy &= bool((best[at] == token).all())


def score(
    network: Network, pairs: Sequence[Pair], lanes: int = 1, done: Callable[[int, Score], Any] | None = None
) -> list[Score]:
    """The score of each continuation after its context; `done` is told each, by its index, once it is known.

    Texts are read in the order of their tokens, so that one memory serves all that begin alike; each of the `lanes`
    has a memory, and they are evaluated together. A continuation that is too long for a call is scored in pieces.
    """
    room = max(ROOM // lanes, LEAST)
    order = sorted(range(len(pairs)), key=lambda i: (*pairs[i][0], *pairs[i][1]))
    scores = [Score() for _ in pairs]
    share = -(-len(order) // lanes) or 1
    seats = [
        Seat(_lane(order[start : start + share], pairs, room, scores, done)) for start in range(0, len(order), share)
    ]
    for _ in rounds(seats, {"target": network}):
        pass
    return scores


def _lane(
    order: Sequence[int], pairs: Sequence[Pair], room: int, scores: Sequence[Score], done: Callable | None
) -> Writer:
    """Ask for one tree after another, and add up."""
    for tree, complete in _trees(order, pairs, room):
        tree.add((yield tree.asked()), scores)
        if done is not None:
            for owner in complete:
                done(owner, scores[owner])


def _trees(order: Sequence[int], pairs: Sequence[Pair], room: int) -> Iterator[tuple[Tree, list[int]]]:
    """Trees of at most `room` nodes, and whose scores are complete with each."""
    tree, complete = None, []
    for owner in order:
        context, tokens = pairs[owner]
        for start in range(0, len(tokens), room):
            before, piece = [*context, *tokens[:start]], tokens[start : start + room]
            if tree is not None and (before != tree.context or len(tree.tokens) + len(piece) - 1 > room):
                yield tree, complete
                tree, complete = None, []
            tree = tree or Tree(before)
            tree.hang(owner, piece)
        complete.append(owner)
    if tree is not None:
        yield tree, complete
