"""Say what is asked of a network and what it answers: a tree of nodes hanging from the decided text."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from saltus.core.canvas import Canvas
from saltus.core.links import Links
from saltus.core.noise import Noise
from saltus.core.sampling import Law, Sampling, choices, float_row, law, one_hot, pick

AUXILIARY = -1  # stands for the token of a node that is none
TARGET = "target"  # the network whose text is written


@dataclass(frozen=True)
class Forward:
    """One network call. Node i reads the decided text, its ancestors and itself.

    `parents[i] < i` is the node before node i, -1 the last decided token. `to` names the network that is asked:
    the target, or a drafter of the method's own. `drafted[i]` is the law that token i was drawn from, where the
    method knows it (None: the token was chosen, not drawn).

    A node with a uniform is no token but an *auxiliary query* (PTP): the adapter's gate is on, its input is the
    embedding of the uniform (NaN: of none), it stands at the position right behind its parent, and its logits are
    for the token *of that position*, where a token's are for the next. A query that has a token is a *guess* (Jacobi
    Forcing): it reads this token's embedding too, and its logits are for the next position. Queries stand behind all
    tokens, and only queries hang from them; no rule, drafter or memory ever takes one for text. To a network that fills
    holes anywhere, positions are those of the open holes in turn, and a query, told no uniform, is a mask (ASSD).
    """

    canvas: Canvas
    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    features: bool = False  # the last hidden states are wanted too (see `Reply`)
    to: str = TARGET
    drafted: tuple[Law | None, ...] | None = None
    uniforms: tuple[float | None, ...] | None = None
    temperature: float = 0.0  # told to the adapter; 0 is greedy
    hidden: Float[Tensor, "slots hidden"] | None = None  # for a drafter: the target's state before each new token

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents)
        assert all(-1 <= parent < i for i, parent in enumerate(self.parents)), "parents come before children"
        if self.uniforms is not None:
            queries = [u is not None for u in self.uniforms]
            assert len(queries) == len(self.tokens)
            assert all(queries[i] or token != AUXILIARY for i, token in enumerate(self.tokens)), "a token is one"
            assert queries == sorted(queries), "queries stand behind all tokens, so that no token hangs from one"

    @cached_property
    def drafts(self) -> int:
        """How many nodes are tokens: they come first."""
        return len(self.tokens) if self.uniforms is None else self.uniforms.count(None)

    @property
    def queries(self) -> range:
        """The nodes that are auxiliary queries."""
        return range(self.drafts, len(self.tokens))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node: 0 for what follows the decided text."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return tuple(depths)

    @cached_property
    def _children(self) -> dict[int, list[int]]:
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents[: self.drafts]):
            children.setdefault(parent, []).append(node)
        return children

    def children(self, node: int) -> list[int]:
        """Tokens that continue `node` (-1: the decided text), in the order they were offered."""
        return self._children.get(node, [])

    @cached_property
    def _hanging(self) -> dict[int, int]:
        hanging: dict[int, int] = {}
        for node in self.queries:
            hanging.setdefault(self.parents[node], node)
        return hanging

    def group(self, node: int) -> list[int]:
        """The auxiliary queries that hang from `node` (-1: the decided text) one behind the other, the first chain."""
        chain = []
        while (query := self._hanging.get(chain[-1] if chain else node)) is not None:
            chain.append(query)
        return chain

    @property
    def guided(self) -> bool:
        """Do guesses hang in it for an adapter to correct?"""
        return any(self.tokens[query] != AUXILIARY for query in self.queries)

    @property
    def guesses(self) -> list[int]:
        """The tokens of the first chain that hangs from the decided text: of Jacobi decoding, its iterate."""
        chain, node = [], -1
        while children := self.children(node):
            node = children[0]
            chain.append(self.tokens[node])
        return chain

    def follow(self, tokens, start: int = -1) -> list[int]:
        """The nodes met when `tokens` are read from `start` on; shorter where the tree ends."""
        path = []
        for token in tokens:
            start = next((child for child in self.children(start) if self.tokens[child] == token), -2)
            if start == -2:
                break
            path.append(start)
        return path

    def path(self, node: int) -> list[int]:
        """The tokens from the decided text down to `node`."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]


@dataclass(frozen=True)
class Reply:
    """What the network answered."""

    logits: Float[Tensor, "rows vocab"]  # row 0 follows the decided text, row i + 1 follows node i
    features: Float[Tensor, "states hidden"] | None = None  # of the tokens read, then of the nodes; any-subset: of rows
    seconds: float = 0.0  # wall time of the call that carried it
    read: int = 0  # decided tokens that the call had to read (the prompt, at first)
    rows: int = 0  # of the whole call, other texts' included
    columns: Int[Tensor, "vocab"] | None = None  # ascending tokens that logits are of, where a drafter knows some only
    links: Links | None = None  # of a network that was trained to say them


@dataclass
class Laws:
    """The laws after the decided text (-1) and after each node, made by the one sampling pipeline when asked for."""

    asked: Forward
    reply: Reply
    sampling: Sampling
    noise: Noise
    _laws: dict[int, Law] = field(default_factory=dict)
    _picks: dict[int, int] = field(default_factory=dict)

    def __getitem__(self, node: int) -> Law:
        if node not in self._laws:
            canvas = self.asked.canvas
            context = None
            if self.sampling.repetition_penalty != 1.0:
                context = np.concatenate([canvas.tokens[canvas.known], np.array(self.asked.path(node), dtype=np.int64)])
            index = canvas.done + self.depth(node)
            if self.sampling.closing and node >= 0 and self.sampling.closed(index - 1, self.asked.tokens[node]):
                self._laws[node] = one_hot(self.asked.tokens[node])
            else:
                self._laws[node] = self._law(self.reply.logits[node + 1], context, index)
        return self._laws[node]

    def _law(self, row: Tensor, context: np.ndarray | None, index: int) -> Law:
        if self.reply.columns is None:
            return law(row, self.sampling, context, index)
        columns = self.reply.columns.cpu().numpy()
        if self.sampling.by_values:
            found = law(row, self.sampling)
            return Law(columns if found.tokens is None else columns[found.tokens], found.weights)
        whole = np.full(1 + int(max(columns[-1], -1 if context is None else context.max())), -np.inf, np.float32)
        whole[columns] = float_row(row)
        return law(torch.from_numpy(whole), self.sampling, context, index)

    def closes(self, tokens: Sequence[int]) -> bool:
        """Does what follows the last of these, decided by the call, follow from it?"""
        return bool(self.sampling.closing and self.closed(tokens))

    def closed(self, tokens: Sequence[int] | np.ndarray) -> int:
        """How many tokens do."""
        return self.sampling.closed(self.asked.canvas.done + len(tokens) - 1, int(tokens[-1]))

    def depth(self, node: int) -> int:
        """How many tokens stand before the hole that this law is for: that of a query without one is its own place."""
        return self.asked.depths[node] + (self.asked.tokens[node] != AUXILIARY) if node >= 0 else 0

    def pick(self, node: int) -> int:
        """The text's own token after `node`: Pick(u, law) with the uniform of that position (PTP, Eq. 2)."""
        if node not in self._picks:
            if self.sampling.bare and node < self.asked.drafts:
                found, columns = choices(self.reply.logits[: self.asked.drafts + 1]), self.reply.columns
                tokens = found if columns is None else columns.cpu().numpy()[found]
                self._picks |= dict(enumerate(tokens.tolist(), start=-1))
            else:
                u = self.noise.one("text", self.asked.canvas.open[self.depth(node)])
                self._picks[node] = pick(u, self[node])
        return self._picks[node]


@dataclass(frozen=True)
class Step:
    """The one record that everyone reads: streaming, metrics, drafters."""

    canvas: Canvas  # before the step
    asked: Forward
    reply: Reply
    laws: Laws
    tokens: np.ndarray  # decided by the step
    node: int  # where the walk ended: -1, or the last accepted node; behind it one token more, unless it closed a hole
    closed: int = 0  # tokens at the end that no law decided, but the one before them, which closed a hole


Writer = Generator[Forward, Reply, None]
