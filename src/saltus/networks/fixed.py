"""Evaluate trees by calls of few fixed shapes: exact where libraries choose kernels by shape, and fit for CUDA graphs.

A decoding call has `width` rows, whoever asks and for however few: plain decoding too. On an accelerator a call of 32
rows costs about what one row costs. A prompt, but for its last token, is read by calls of `chunk` rows that start at
multiples of `chunk`. The extent of attention is the first of `least`, 2 · `least`, 4 · `least`, … that holds the
row's position; a tree that crosses such a border is evaluated by two calls. So the shapes in which a token is
evaluated follow from its position and from where its prompt ended, never from the method, and attention sums in an
order that follows from the position (canonical.py). Texts of a batch go one by one, since a wider call would be
another shape: a batch is as quick as its texts in turn.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from saltus.core.forward import Forward, Reply
from saltus.networks import attention
from saltus.networks.canonical import SCRATCH, Board, Canonical, Seat, split
from saltus.networks.memory import Memory

WIDTH = 32  # rows that an accelerator computes for about the price of one
log = logging.getLogger("saltus")

Evaluate = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""Tokens [1, rows], positions [1, rows], how many of the last rows have logits (0: all) → logits, features."""


@dataclass
class SeatedMemory:
    """What was read of one text, and where its keys and values are: text in its own slots, nodes in scratch."""

    told: Memory = field(default_factory=Memory)  # of tokens only
    seat: Seat | None = None
    moves: list[tuple[int, int]] = field(default_factory=list)  # (to, at): accepted nodes, to be moved by the next call

    @property
    def tokens(self) -> np.ndarray:
        return self.told.tokens

    @property
    def keys(self) -> Tensor | None:
        return None if self.seat is None else self.seat.keys

    def recall(self, decided: np.ndarray) -> int:
        """How many of the decided tokens need not be read again; the branch that became text is kept."""
        if self.told.tree is not None:
            base = len(self.told.tokens)
            nodes = self.told.tree.follow(decided[base:])
            self.moves += [(SCRATCH + base + depth, node + 1) for depth, node in enumerate(nodes)]
        return self.told.recall(decided)


class Rows(NamedTuple):
    """What one call evaluates: the columns of a board, and where its logits belong (−1: nowhere)."""

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    recent: np.ndarray
    wanted: np.ndarray

    def take(self, places: np.ndarray | slice) -> Rows:
        return Rows(*(column[places] for column in self))


@dataclass
class Fixed:
    """Forwards by fixed shapes. `graphs` replays each shape from a CUDA graph; without it the same code runs as it is.

    `width` bounds the depth of a tree, and is part of what a text depends on.
    """

    evaluate: Evaluate
    layers: int
    device: torch.device
    width: int = WIDTH
    chunk: int = 256
    least: int = 512  # extent, a multiple of chunk
    graphs: bool = False
    free: list[Seat] = field(default_factory=list)  # seats whose texts are gone
    boards: dict[int, Board] = field(default_factory=dict)
    pool: Any = None  # memory of the graphs, which are replayed one at a time
    stream: Any = None  # for captures: matrix libraries keep a workspace for each stream

    def memory(self) -> SeatedMemory:
        return SeatedMemory()

    def forward(self, ask: Forward, memory: SeatedMemory) -> Reply:
        """Logits after the decided text and after each node. Errors: ValueError if the tree is too deep or large."""
        started, nodes, depth = time.perf_counter(), len(ask.tokens), max(ask.depths, default=-1) + 1
        if nodes >= SCRATCH or depth > self.width:
            raise ValueError(
                f"a tree of {nodes} nodes is {depth} deep, but calls hold paths of {self.width} and trees of"
                f" {SCRATCH - 1}; load the model with a larger budget, or ask less"
            )
        past = memory.recall(ask.canvas.decided)
        try:
            logits, features = self._answer(ask, past, memory)
        except BaseException:
            memory.told, memory.moves = Memory(), []
            raise
        memory.told.tokens = ask.canvas.decided.copy()
        memory.told.tree = ask if nodes else None
        if self.device.type == "cuda":  # so that seconds are those of the call
            torch.cuda.current_stream(self.device).synchronize()
        read = len(ask.canvas.decided) - past
        return Reply(logits, features if ask.features else None, time.perf_counter() - started, read, read + nodes)

    def _answer(self, ask: Forward, past: int, memory: SeatedMemory) -> tuple[Tensor, Tensor]:
        """Logits and features of the wanted rows, each [nodes + 1, …]."""
        seat, pieces = self._seat(memory, len(ask.canvas.tokens)), []
        for rows, width in _calls(ask, past, self):
            out = self._call(seat, rows, width, memory.moves)
            memory.moves = []
            if len(places := np.flatnonzero(rows.wanted >= 0)):  # they stand together, at the end
                own = slice(int(places[0]), int(places[-1]) + 1)
                pieces.append((rows.wanted[own], *(x[own].clone() for x in out)))  # a call overwrites the one before
        if len(pieces) == 1:
            return pieces[0][1:]
        order = torch.from_numpy(np.argsort(np.concatenate([piece[0] for piece in pieces]))).to(self.device)
        logits, features = (torch.cat([piece[i] for piece in pieces])[order] for i in (1, 2))
        return logits, features

    def _seat(self, memory: SeatedMemory, positions: int) -> Seat:
        """The seat of a text, with room for all of it. Those of texts that are gone are taken again."""
        room = extent(positions - 1, self.least)
        if memory.seat is None:
            fitting = [seat for seat in self.free if seat.capacity >= room]
            seat = min(fitting or self.free, key=lambda seat: seat.capacity, default=None)
            if seat is None:
                seat = Seat(self.layers, room)
            else:
                self.free.remove(seat)
            memory.seat = seat
            weakref.finalize(memory, self.free.append, seat)
        memory.seat.grow(room)
        return memory.seat

    def _call(self, seat: Seat, rows: Rows, width: int, moves: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Logits and features of all rows; they are overwritten by the next call."""
        if width not in self.boards:
            self.boards[width] = Board(width, self.width, self.device)
        board, reach = self.boards[width], extent(int(rows.positions[0]), self.least)
        if self.graphs and (width, reach) not in seat.graphs:
            self._capture(seat, board, reach)
        board.put(rows.tokens, rows.positions, rows.slots, rows.recent, moves)
        if not self.graphs:
            return self._evaluate(seat, board, reach)
        graph, *out = seat.graphs[width, reach]
        graph.replay()
        return out[0], out[1]

    def _evaluate(self, seat: Seat, board: Board, reach: int) -> tuple[Tensor, Tensor]:
        seat.move(board.to, board.at)
        with attention.during(Canonical(seat, board, reach)):
            return self.evaluate(board.tokens[None], board.positions[None], 0 if board.rows == self.width else 1)

    def _capture(self, seat: Seat, board: Board, reach: int) -> None:
        """Record a call over this seat, after two idle ones that load kernels and make buffers."""
        board.clear()
        self.stream = self.stream or torch.cuda.Stream(self.device)
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                self._evaluate(seat, board, reach)
        current.wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
                out = self._evaluate(seat, board, reach)
        except RuntimeError as error:
            self.graphs = False
            log.warning("calls cannot be captured as CUDA graphs, going on without: %s", str(error).splitlines()[0])
        else:
            seat.graphs[board.rows, reach] = graph, *out


def width(budget: int) -> int:
    """Rows of a decoding call that holds the last decided token and so many nodes; few widths, so that texts agree."""
    return (budget // WIDTH + 1) * WIDTH


def extent(position: int, least: int) -> int:
    """The first of least, 2 least, 4 least, … that holds a position."""
    blocks = position // least
    return least << blocks.bit_length()


def _calls(ask: Forward, past: int, by: Fixed) -> Iterator[tuple[Rows, int]]:
    """What is to be evaluated, cut into calls: (what they hold, their rows). Parents come before children."""
    prompt = int(ask.canvas.order[0]) - 1  # the last token of a prompt is read as all that follow it are
    start = past // by.chunk * by.chunk if past < prompt else past
    rows = _rows(ask, start, by.width)
    for place in range(0, prompt - start, by.chunk):
        yield rows.take(slice(place, min(place + by.chunk, prompt - start))), by.chunk
    first = max(prompt - start, 0)
    extents = np.array([extent(position, by.least) for position in rows.positions[first:].tolist()])
    for one in np.unique(extents):
        places = np.flatnonzero(extents == one) + first
        for at in range(0, len(places), by.width):
            yield rows.take(places[at : at + by.width]), by.width


def _rows(ask: Forward, start: int, reach: int) -> Rows:
    """The decided tokens from `start` on, then the nodes."""
    decided, nodes = ask.canvas.decided, len(ask.tokens)
    base = len(decided)
    unread = np.arange(start, base)
    positions = np.concatenate([unread, base + np.array(ask.depths, dtype=np.int64)])
    slots = np.concatenate([SCRATCH + unread, 1 + np.arange(nodes)])
    recent = split(positions, reach)[:, None] + np.arange(2 * reach)  # as positions
    hidden = recent > positions[:, None]
    ancestors = np.zeros((len(positions), max(ask.depths, default=-1) + 2), dtype=np.int64)  # slots, by depth
    for node, (parent, depth) in enumerate(zip(ask.parents, ask.depths, strict=True)):
        row = len(unread) + node
        if parent >= 0:
            ancestors[row] = ancestors[len(unread) + parent]
        ancestors[row, depth] = node + 1
    depths = (recent - base).clip(0, ancestors.shape[1] - 1)
    where = np.where(recent < base, SCRATCH + recent, np.take_along_axis(ancestors, depths, 1))
    where = np.where(hidden, slots[:, None], where)
    wanted = np.concatenate([np.where(unread == base - 1, 0, -1), 1 + np.arange(nodes)])
    return Rows(np.concatenate([decided[start:], ask.tokens]).astype(np.int64), positions, slots, where, wanted)


def unfit(model: Any) -> str | None:
    """Why fixed shapes cannot make a model's rows independent; None where they can."""
    config, name = model.config.get_text_config(), type(model).__name__
    if any(getattr(config, count, None) for count in ("num_experts", "num_local_experts", "n_routed_experts")):
        return f"{name} has experts, which take as many rows as the text sends them"
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rotary, *(each for each in rotary.values() if isinstance(each, dict))]
    if any(each.get("rope_type") in ("dynamic", "longrope") for each in kinds):
        return f"{name} turns all rows of a call by the furthest of them"
    return None
