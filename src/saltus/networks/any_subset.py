"""Evaluate trees on a model that fills holes anywhere: two streams of rows through the layers of one decoder.

Content rows are tokens; each sees the text that was given, which sees all of itself, and what was decided before it.
Query rows are the mask token at the position of a hole; they see the same and themselves, and say the law of that
hole (ASSD, §3). Keys and values are kept for content rows alone, in deciding order: what is decided later never
changes them, so that a call reads its new tokens and its queries, and nothing twice.

The decoder is a causal model's (rotary positions, told for each row), so its kernels and their equal rounding serve
here too; that it was trained for any subset, its configuration says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from saltus.core.canvas import Canvas
from saltus.core.forward import AUXILIARY, Forward, Reply
from saltus.core.links import Links
from saltus.networks.attention import Part
from saltus.networks.causal import ROWS, CausalNetwork, _Read
from saltus.networks.folders import LINKS
from saltus.networks.memory import Memory

ANY_SUBSET = "any_subset"  # in a model's configuration: {"mask": token, "blank": token that ends an open hole}


@dataclass
class Placed(Memory):
    """Keys and values of one text in deciding order, and where its tokens stand."""

    places: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    given: int = 0  # how many tokens saw all of each other

    def recall_placed(self, canvas: Canvas) -> int:
        """How many of the known tokens need not be read again; none, if the given ones are others."""
        known, before = canvas.known, len(self.places)
        count = self.recall(canvas.tokens[known], again=0)
        places = self.places[: min(before, count)]
        if self.given != len(canvas.given) or len(places) < self.given or (places != known[: len(places)]).any():
            count = 0
        self.tokens, self.places, self.given = self.tokens[:count], known, len(canvas.given)
        return count


@dataclass
class AnySubsetNetwork(CausalNetwork):
    """An any-subset model behind Forward and Reply.

    Row 0 is for the first open hole, row i + 1 for the hole behind that of node i, given the text, the node's
    ancestors and itself. An auxiliary query is told no uniform; it is for the hole of its own depth, given the token
    that its group hangs from and what stands before that. On CUDA, calls round as their shapes have it.
    """

    any_subset = True
    links: Links | None = None

    def __post_init__(self) -> None:
        self.free = self.free or self.model.device.type == "cuda"
        self.shaped = False
        told = getattr(self.model.config, ANY_SUBSET)
        self.mask, self.blank = int(told["mask"]), told.get("blank")
        super().__post_init__()

    @property
    def rows(self) -> int:
        """A given text is read in one call, since all of it sees all of it."""
        return self.model.config.max_position_embeddings + ROWS

    @staticmethod
    def read(canvas: Canvas) -> np.ndarray:
        return canvas.tokens[canvas.known]

    def memory(self) -> Placed:
        return Placed()

    def _can_answer_queries(self) -> None:
        """It always can."""

    def attach(self, adapter: Any) -> None:
        """Errors: ValueError: adapters are for causal models."""
        if adapter is not None:
            raise ValueError("adapters are for causal models, which this one is not; draft with assd")

    def tap(self, taps: Sequence[int]) -> None:
        """Errors: ValueError: states are those of causal models."""
        raise ValueError("drafters and heads read states of a causal model, which this one is not; draft with assd")

    def forward(self, asks: Sequence[Forward], memories: Sequence[Any]) -> list[Reply]:
        return [self._replied(*one) for one in zip(asks, super().forward(asks, memories), strict=True)]

    def _replied(self, ask: Forward, reply: Reply) -> Reply:
        """Its rows as they were asked for; features are those of the rows, since drafts are not of what was read."""
        if not ask.queries and reply.features is None:
            return replace(reply, links=self.links)
        asked, rows = wanted(ask)
        features = None if reply.features is None else reply.features[len(reply.features) - len(asked) :]
        if ask.queries:
            features = None if features is None else rows_of(features, rows)
            reply = replace(reply, logits=rows_of(reply.logits, rows))
        return replace(reply, features=features, links=self.links)

    def _recall(self, memory: Any, ask: Forward) -> int:
        return memory.recall_placed(ask.canvas)

    def _reads(self, text: int, ask: Forward, memory: Memory, past: int) -> Iterator[_Read]:
        """New tokens, then the tokens of the tree, then the queries, all in one call."""
        canvas = ask.canvas
        places = canvas.known[past:]
        unread, drafts = len(places), ask.drafts
        queries, _ = wanted(ask)
        contents = unread + drafts
        if contents + len(queries) > self.rows:
            raise ValueError(f"a call has {contents + len(queries)} rows, but {self.rows} fit; shorten the text")
        visible = np.zeros((contents + len(queries),) * 2, dtype=np.uint8)
        given = max(len(canvas.given) - past, 0)
        visible[:unread, :unread] = np.tri(unread, dtype=np.uint8)
        visible[:given, :given] = 1
        for node in range(drafts):
            row, parent = unread + node, ask.parents[node]
            visible[row] = visible[unread + parent] if parent >= 0 else 0
            visible[row, :unread] = 1
            visible[row, row] = 1
        for number, (node, _) in enumerate(queries):
            row = contents + number
            visible[row, :contents] = visible[unread + node, :contents] if node >= 0 else 0
            visible[row, :unread] = 1
            visible[row, row] = 1
        open_ = canvas.open
        nodes = open_[np.array(ask.depths[:drafts], dtype=np.int64)]
        asked = open_[[place for _, place in queries]]
        tokens = [*canvas.tokens[places].tolist(), *ask.tokens[:drafts], *[self.mask] * len(queries)]
        part = Part(memory, past, np.concatenate([places, nodes, asked]), visible)
        yield _Read(text, tokens, part, len(queries), ask.features)


def read_links(folder: Path, vocab: int, hidden: int) -> Links | None:
    """Those of a model's folder. Errors: ValueError where they are damaged or fit other words or states."""
    if not (folder / LINKS).is_file():
        return None
    try:
        found = load_file(folder / LINKS)
        links = Links(*(found[part.name].float().numpy() for part in fields(Links)))
        (_, rank) = links.left.shape
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{folder / LINKS} is damaged ({error}); delete it, or train the model again") from None
    if [part.shape for part in vars(links).values()] != [(vocab, rank)] * 3 + [(hidden, rank + 1)]:
        raise ValueError(f"{folder / LINKS} is of another model; delete it, or train the model again")
    return links


def write_links(links: Links, folder: Path) -> None:
    """In bfloat16, beside the model's weights."""
    parts = {name: torch.from_numpy(part).bfloat16() for name, part in vars(links).items()}
    save_file(parts, folder / LINKS)


def rows_of(table: Float[Tensor, "rows size"], places: Sequence[int]) -> Float[Tensor, "places size"]:
    """Some rows, some of them twice; on the CPU without torch, whose threads would wake for it."""
    if table.device.type != "cpu":
        return table[places]
    bits = table.view(torch.int16 if table.element_size() == 2 else torch.int32).numpy()
    return torch.from_numpy(bits[places]).view(table.dtype)


def wanted(ask: Forward) -> tuple[list[tuple[int, int]], list[int]]:
    """Which laws are wanted, (token node that is seen last, number of the open hole), and which of them each row is.

    A group's first query is for the hole that its node's own row is for, so there it is the same.
    """
    found: dict[tuple[int, int], int] = {}
    rows = [found.setdefault((-1, 0), 0)]
    seen: list[int] = []
    for node, (token, parent) in enumerate(zip(ask.tokens, ask.parents, strict=True)):
        auxiliary = token == AUXILIARY
        seen.append((seen[parent] if parent >= 0 else -1) if auxiliary else node)
        key = seen[node], ask.depths[node] + (not auxiliary)
        rows.append(found.setdefault(key, len(found)))
    return list(found), rows
