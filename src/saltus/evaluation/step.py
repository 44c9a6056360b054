"""Measure what a call costs by its nodes, by the text before it, and by how many texts share it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from saltus.core.canvas import continuation
from saltus.core.decode import Network
from saltus.core.forward import Forward

NODES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (128, 256, 512, 1024, 2048)
BATCHES = (1, 2, 4, 8)
MOST_NODES = 128
DEEP = 16  # drafted tokens of one path: a call of many nodes holds several paths
PREFILLS = 3  # rounds that read the texts afresh: a long text takes seconds

Clock = Callable[[], float]


class Cell(NamedTuple):
    """A call: `batch` texts of `length` tokens, each with `nodes` nodes, its last decided token included."""

    nodes: int
    length: int
    batch: int = 1


@dataclass(frozen=True)
class Grid:
    """Which calls are measured, and how often. Batches are measured at one length. Errors: ValueError."""

    nodes: tuple[int, ...] = NODES
    lengths: tuple[int, ...] = LENGTHS
    batches: tuple[int, ...] = BATCHES
    rounds: int = 7

    def __post_init__(self) -> None:
        for name, most in (("nodes", MOST_NODES), ("lengths", None), ("batches", None)):
            numbers = getattr(self, name)
            if not numbers:
                raise ValueError(f"{name} is empty; give whole numbers, such as 1,8,32")
            if wrong := [n for n in numbers if n < 1 or (most and n > most)]:
                bound = f"lie in 1…{most}" if most else "be 1 or more"
                raise ValueError(f"{name} has {wrong[0]:,}, but each must {bound}")
            object.__setattr__(self, name, tuple(sorted(set(numbers))))
        if self.rounds < 1:
            raise ValueError(f"rounds is {self.rounds}, but must be 1 or more")

    def check(self, context: int | None, name: str) -> None:
        """Raise ValueError where a text with its nodes is longer than what the model called `name` reads."""
        if context is not None and (longest := self.lengths[-1]) + DEEP > context:
            raise ValueError(
                f"a text of {longest:,} tokens, and nodes {DEEP} deep behind it, is too long for {name}, which reads"
                f" {context:,}; give shorter lengths"
            )

    @property
    def middle(self) -> int:
        """The length at which batches are measured."""
        return self.lengths[(len(self.lengths) - 1) // 2]

    @property
    def cells(self) -> list[Cell]:
        alone = [Cell(nodes, length) for length in self.lengths for nodes in self.nodes]
        together = [Cell(nodes, self.middle, batch) for batch in self.batches for nodes in self.nodes]
        return list(dict.fromkeys([*alone, *together]))

    @property
    def calls(self) -> int:
        """How many calls `measure` makes, warm-up and reading of the texts included."""
        texts = len(self.lengths) + max(self.batches) - 1
        return texts + (self.rounds + 1) * len(self.cells) + (min(self.rounds, PREFILLS) + 1) * len(self.lengths)


def fitting(context: int | None) -> tuple[int, ...]:
    """The usual lengths that fit into a context; a half of it where none does."""
    fit = tuple(length for length in LENGTHS if context is None or length + DEEP <= context)
    return fit or (max((context or 0) // 2, 1),)


@dataclass
class Timings:
    """Seconds by round. They are added as they are measured: who is interrupted keeps what there is."""

    calls: dict[Cell, list[float]] = field(default_factory=dict)
    prefill: dict[int, list[float]] = field(default_factory=dict)


def measure(
    network: Network,
    grid: Grid,
    vocabulary: int,
    timings: Timings,
    clock: Clock = time.perf_counter,
    settle: Callable[[], Any] = lambda: None,
) -> Iterator[None]:
    """Fill `timings`; yields after each call. Each round makes every call once, forwards and backwards in turn,
    so that a machine that drifts hurts all alike; the first round is a warm-up. `settle` waits for the device."""
    seats = {(length, 0) for length in grid.lengths} | {(grid.middle, seat) for seat in range(max(grid.batches))}
    memories = {seat: network.memory() for seat in sorted(seats)}

    def seconds(cell: Cell, kept: Sequence[Any]) -> float:
        asks = [ask(cell.nodes, cell.length, vocabulary, seat) for seat in range(cell.batch)]
        settle()
        started = clock()
        network.forward(asks, kept)
        settle()
        return clock() - started

    for (length, seat), memory in memories.items():
        network.forward([ask(1, length, vocabulary, seat)], [memory])
        yield
    for turn in range(-1, grid.rounds):
        for cell in grid.cells[:: 1 if turn % 2 else -1]:
            spent = seconds(cell, [memories[cell.length, seat] for seat in range(cell.batch)])
            if turn >= 0:
                timings.calls.setdefault(cell, []).append(spent)
            yield
        for length in grid.lengths if turn < PREFILLS else ():
            spent = seconds(Cell(1, length), [network.memory()])
            if turn >= 0:
                timings.prefill.setdefault(length, []).append(spent)
            yield


def ask(nodes: int, length: int, vocabulary: int, seat: int = 0) -> Forward:
    """A call of `nodes` nodes, the last decided token included, behind a text of `length` tokens of no meaning."""
    tokens = (np.arange(length + nodes - 1, dtype=np.int64) * 7919 + 104729 * (seat + 1)) % vocabulary
    parents = tuple(-1 if node % DEEP == 0 else node - 1 for node in range(nodes - 1))
    return Forward(continuation(tokens[:length], DEEP), tuple(tokens[length:].tolist()), parents)


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds: the median, the first and third quartile, and over how many rounds."""
    low, middle, high = [1000 * each for each in quartiles(seconds)]
    return {"ms": middle, "low": low, "high": high, "rounds": len(seconds)}


def quartiles(numbers: Sequence[float]) -> tuple[float, float, float]:
    """The quartiles of one number or more."""
    if len(numbers) == 1:
        return numbers[0], numbers[0], numbers[0]
    low, middle, high = statistics.quantiles(numbers, method="inclusive")
    return low, middle, high


def memory_growth(network: Network, vocabulary: int, context: int | None) -> dict[str, Any]:
    """Slots that a text's memory fills beyond its decided tokens, over calls of many nodes that are all rejected."""
    memory, text, over = network.memory(), ask(1, 32, vocabulary).canvas.decided, []
    for _ in range(16 if context is None else max(min(16, context - 40), 1)):
        network.forward([Forward(continuation(text, 2), tuple(range(16)), (-1,) * 16)], [memory])
        over.append(len(memory.tokens) - len(text))
        text = np.append(text, 5)
    return {"slots_over_decided_tokens": max(over)}
