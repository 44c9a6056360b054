"""Describe one forward pass of a network over a draft tree: its inputs and its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from saltus.core.candidates import Candidates
from saltus.core.canvas import Canvas
from saltus.core.noise import Noise
from saltus.core.picking import Distribution
from saltus.core.tree import Drafts

NO_TOKEN = -1  # the token id of a node that has no token
PLACEHOLDER_TOKEN = 0  # that a network reads in its place; its embedding is replaced by that of the query
TARGET = "target"  # the name of the network whose text is decoded

QueryStart = Literal["blank", "last-token"]
"""What the first query of a chain reads. blank: no token; query i stands at the position of the token that it predicts.
last-token: the token before the chain, at that token's own position; each query stands one position earlier."""


def depths(parents: Sequence[int]) -> list[int]:
    """How many nodes come before each node on its path; a node without a parent has −1 there."""
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return found


class NodeKind(Enum):
    """What a node of the tree is, and what its logits are for."""

    DRAFT_TOKEN = "draft token"  # a token to verify; its logits are for the next position
    UNIFORM_QUERY = "uniform query"  # PTP: no token, conditioned on a uniform; its logits are for its own position
    MASK_QUERY = "mask query"  # no token and no uniform (ASSD, MTP baselines); its logits are for its own position
    TOKEN_QUERY = "token query"  # Jacobi Forcing: a guessed token that only the adapter reads; logits as DRAFT_TOKEN

    @property
    def has_token(self) -> bool:
        """True for a draft token and for a guess that only the adapter reads; false for a query without a token."""
        return self in (NodeKind.DRAFT_TOKEN, NodeKind.TOKEN_QUERY)


class NodeRows(NamedTuple):
    """What a causal network reads for the nodes of a tree."""

    tokens: list[int]  # PLACEHOLDER_TOKEN for queries without one
    offsets: Int[np.ndarray, "nodes"]  # of their positions from the first undecided one
    has_token: tuple[bool, ...]  # of each query


@dataclass(frozen=True)
class GumbelMax:
    """How the rows of a pass pick the text's tokens: by the raw logits, a temperature and the text's Gumbel noise.

    A network on a GPU picks them there (`ForwardOutputs.picked`), so that the logits need not be copied to the host.
    """

    noise: Noise
    temperature: float  # above 0

    def keys(self, canvas: Canvas, depths: Int[np.ndarray, "rows"]) -> Int[np.ndarray, "rows 2"]:
        """The keys of the noise (`Noise.token_keys`, as int64) of the open positions with these numbers."""
        last = int(depths.max(initial=0))
        keys = self.noise.keys_of_tokens("text", canvas.open_positions[: last + 1])
        return keys.view(np.int64)[depths.clip(0, len(keys) - 1)]


@dataclass(frozen=True)
class ForwardInputs:
    """The inputs of one forward pass for one text: a tree of nodes after the decided tokens.

    Node i attends to the decided tokens, to its ancestors and to itself. `parents[i] < i` is the node before node i,
    −1 the last decided token. Draft tokens come first; after them come *query nodes*, for which a trained adapter or
    drafter is switched on. Only queries descend from queries, and only DRAFT_TOKEN nodes are ever verified.

    A network that fills holes anywhere (ASSD) takes positions from the open holes in turn; its queries are masks.
    `hidden_states` are those of the target before each decided token that the drafter has not read yet, in order.
    """

    canvas: Canvas
    tokens: tuple[int, ...] = ()  # of each node; NO_TOKEN for queries without one
    parents: tuple[int, ...] = ()
    output_hidden_states: bool = False  # return the last hidden states as well (see `ForwardOutputs`)
    network_name: str = TARGET  # the target, or a method's own draft model
    draft_distributions: tuple[Distribution | None, ...] | None = None  # that draft tokens were sampled from
    kinds: tuple[NodeKind, ...] = ()  # of each node; empty: all are draft tokens
    uniforms: tuple[float, ...] = ()  # of each query node; NaN where it is not conditioned on one
    temperature: float = 0.0  # an input of the adapter; 0 is greedy
    hidden_states: Float[Tensor, "slots hidden"] | None = None  # for a drafter: of the target, see above
    gumbel_max: GumbelMax | None = None  # of the decided text and draft tokens; None: the host picks
    candidate_temperature: float = 0.0  # of sampling for which candidates are enough; 0: they are of no use
    reads_logits: bool = False  # the host reads rows of logits: a GPU may copy them with the tokens that it finds
    drafts: Sequence[Drafts] = ()  # all offered ones, of which the tokens were chosen; no network reads them
    # of a draft model that goes on: probabilities of acceptance of what it drafted so far; no network reads them
    draft_probabilities: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents)
        assert all(-1 <= parent < i for i, parent in enumerate(self.parents)), "parents come before children"
        if self.kinds:
            assert len(self.kinds) == len(self.tokens)
            queries = [kind is not NodeKind.DRAFT_TOKEN for kind in self.kinds]
            assert queries == sorted(queries), "queries come after all draft tokens, so that no draft descends from one"
            assert all(k.has_token == (t != NO_TOKEN) for k, t in zip(self.kinds, self.tokens, strict=True))
        assert len(self.uniforms) == len(self.query_nodes)

    @cached_property
    def num_draft_tokens(self) -> int:
        """How many nodes are draft tokens: the first ones."""
        return self.kinds.count(NodeKind.DRAFT_TOKEN) if self.kinds else len(self.tokens)

    @property
    def query_nodes(self) -> range:
        """The nodes that are queries."""
        return range(self.num_draft_tokens, len(self.tokens))

    def has_own_position(self, node: int) -> bool:
        """True if the logits of the node are for its own position, false if they are for the next one."""
        return bool(self.kinds) and not self.kinds[node].has_token

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node: 0 directly after the decided tokens."""
        return tuple(depths(self.parents))

    @property
    def is_path(self) -> bool:
        """True if all nodes are draft tokens, each the only child of the one before it."""
        return not self.kinds and self.parents == tuple(range(-1, len(self.parents) - 1))

    def node_rows(self, query_start: QueryStart = "blank") -> NodeRows:
        """What a causal network reads for the nodes. Token queries have tokens and positions of their own."""
        tokens = [token if token != NO_TOKEN else PLACEHOLDER_TOKEN for token in self.tokens]
        offsets, has_token = np.array(self.depths, dtype=np.int64), [self.kinds[q].has_token for q in self.query_nodes]
        if query_start == "last-token":
            for number, query in enumerate(self.query_nodes):
                if has_token[number]:
                    continue
                offsets[query] -= 1
                parent = self.parents[query]
                if parent < self.num_draft_tokens:
                    tokens[query] = self.tokens[parent] if parent >= 0 else int(self.canvas.decided_prefix[-1])
                    has_token[number] = True
        return NodeRows(tokens, offsets, tuple(has_token))

    @cached_property
    def _children(self) -> dict[int, list[int]]:
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents[: self.num_draft_tokens]):
            children.setdefault(parent, []).append(node)
        return children

    def children(self, node: int) -> list[int]:
        """Draft tokens after `node` (−1: the decided tokens), in the order in which they were offered."""
        return self._children.get(node, [])

    @cached_property
    def _first_query(self) -> dict[int, int]:
        first: dict[int, int] = {}
        for node in self.query_nodes:
            first.setdefault(self.parents[node], node)
        return first

    def query_chain(self, node: int) -> list[int]:
        """Query nodes after `node` (−1: the decided tokens): its first query, the first one after that, and so on."""
        chain: list[int] = []
        while (query := self._first_query.get(chain[-1] if chain else node)) is not None:
            chain.append(query)
        return chain

    @property
    def has_token_queries(self) -> bool:
        """True if the tree carries guesses for an adapter to correct (Jacobi Forcing)."""
        return NodeKind.TOKEN_QUERY in self.kinds

    @property
    def first_chain_tokens(self) -> list[int]:
        """The tokens of the first chain of draft tokens; in Jacobi decoding the iterate."""
        chain, node = [], -1
        while children := self.children(node):
            node = children[0]
            chain.append(self.tokens[node])
        return chain

    def matching_nodes(self, tokens, start: int = -1) -> list[int]:
        """The draft nodes along `tokens` from `start` on; shorter where the tree ends."""
        wanted, path = np.asarray(tokens).tolist(), []
        for node in range(self.num_draft_tokens):  # children come after their parents
            if len(path) == len(wanted):
                break
            if self.parents[node] == start and self.tokens[node] == wanted[len(path)]:
                path.append(node)
                start = node
        return path

    def path(self, node: int) -> list[int]:
        """The nodes from the decided tokens down to `node`, itself included; empty for −1."""
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """The tokens of `path`."""
        return [self.tokens[ancestor] for ancestor in self.path(node)]


@dataclass(frozen=True)
class ForwardOutputs:
    """The outputs of one forward pass for one text. A network whose drafter reads more has a subclass of its own."""

    logits: Float[Tensor, "rows vocab"]  # row 0 is for the position after the decided tokens, row i + 1 is of node i
    hidden_states: Float[Tensor, "states hidden"] | None = None  # [context tokens read + nodes]; any-subset: [rows]
    seconds: float = 0.0  # wall time of the batched call
    context_tokens_read: int = 0  # decided tokens that were not in the KV cache: the prompt, at first
    num_rows: int = 0  # of the whole batched call
    token_ids: Int[Tensor, "vocab"] | None = None  # ascending ids of the columns, where a drafter knows only some
    # of each row the first greatest logit in float32, −1 where that is not finite; None: nobody looked for them yet
    likeliest: Int[np.ndarray, "rows"] | None = None
    # the tokens that rows pick by `ForwardInputs.gumbel_max`, −1 where the host must decide; None: nobody looked
    picked: Int[np.ndarray, "rows"] | None = None
    candidates: Sequence[Candidates] | None = None  # of these rows, from a GPU; None: there are only logits
