"""Measure what a call costs by its nodes, by the text before it, and by how many texts share it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple

import numpy as np

from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.core.protocols import Network
from saltus.models.cpu.chunked_prefill import MAX_NODES

DEFAULT_NODES = (1, 2, 4, 8, 16, 32, 64)
DEFAULT_LENGTHS = (128, 256, 512, 1024, 2048)
DEFAULT_BATCHES = (1, 2, 4, 8)
PATH_LENGTH = 16  # drafted tokens of one path: a call of many nodes holds several paths
PREFILL_ROUNDS = 3  # rounds that read the texts afresh: a long text takes seconds

Clock = Callable[[], float]
_MISSING = object()

WrapFunction = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""(name of a part, function) → the function, watched."""


class CallShape(NamedTuple):
    """A call: `batch` texts of `length` tokens, each with `nodes` nodes, its last decided token included."""

    nodes: int
    length: int
    batch: int = 1


@dataclass(frozen=True)
class CallGrid:
    """The calls to measure, and how often. Batches are measured at one length. Errors: ValueError."""

    nodes: tuple[int, ...] = DEFAULT_NODES
    lengths: tuple[int, ...] = DEFAULT_LENGTHS
    batches: tuple[int, ...] = DEFAULT_BATCHES
    rounds: int = 7

    def __post_init__(self) -> None:
        for name, most in (("nodes", MAX_NODES), ("lengths", None), ("batches", None)):
            numbers = getattr(self, name)
            if not numbers:
                raise ValueError(f"{name} is empty; give whole numbers, such as 1,8,32")
            if wrong := [n for n in numbers if n < 1 or (most and n > most)]:
                bound = f"lie in 1…{most}" if most else "be 1 or more"
                raise ValueError(f"{name} has {wrong[0]:,}, but each must {bound}")
            object.__setattr__(self, name, tuple(sorted(set(numbers))))
        if self.rounds < 1:
            raise ValueError(f"rounds is {self.rounds}, but must be 1 or more")

    def check_context_length(self, context: int | None, name: str) -> None:
        """Raise ValueError if a text with its nodes exceeds the context of the model called `name`."""
        if context is not None and (longest := self.lengths[-1]) + PATH_LENGTH > context:
            raise ValueError(
                f"a text of {longest:,} tokens, and nodes {PATH_LENGTH} deep after it, is too long for {name},"
                f" which reads {context:,}; give shorter lengths"
            )

    @property
    def batch_length(self) -> int:
        """The length at which batches are measured."""
        return self.lengths[(len(self.lengths) - 1) // 2]

    @property
    def call_shapes(self) -> list[CallShape]:
        alone = [CallShape(nodes, length) for length in self.lengths for nodes in self.nodes]
        together = [CallShape(nodes, self.batch_length, batch) for batch in self.batches for nodes in self.nodes]
        return list(dict.fromkeys([*alone, *together]))

    @property
    def num_calls(self) -> int:
        """How many calls are made, warm-up and prefill included."""
        texts, prefills = len(self.lengths) + max(self.batches) - 1, min(self.rounds, PREFILL_ROUNDS) + 1
        return texts + (self.rounds + 1) * len(self.call_shapes) + prefills * len(self.lengths)


def default_lengths(context: int | None) -> tuple[int, ...]:
    """The usual lengths that fit into a context; half the context if none does."""
    fit = tuple(length for length in DEFAULT_LENGTHS if context is None or length + PATH_LENGTH <= context)
    return fit or (max((context or 0) // 2, 1),)


@dataclass
class CallTimings:
    """Seconds by call and round, filled as they are measured, so that an interrupted run keeps them."""

    call_seconds: dict[CallShape, list[float]] = field(default_factory=dict)
    prefill_seconds: dict[int, list[float]] = field(default_factory=dict)


def measure_calls(
    network: Network,
    grid: CallGrid,
    vocab_size: int,
    timings: CallTimings,
    clock: Clock = time.perf_counter,
    synchronize: Callable[[], Any] = lambda: None,
) -> Iterator[None]:
    """Fill `timings`; yields after each call. Each round makes every call once, in alternating order, so that drift of
    the machine affects all alike; the first round is a warm-up. `synchronize` waits for the device."""
    sequences = {(length, 0) for length in grid.lengths} | {
        (grid.batch_length, sequence) for sequence in range(max(grid.batches))
    }
    kv_caches = {sequence: network.new_kv_cache() for sequence in sorted(sequences)}

    def seconds(cell: CallShape, kept: Sequence[Any]) -> float:
        batch = [synthetic_inputs(cell.nodes, cell.length, vocab_size, sequence) for sequence in range(cell.batch)]
        synchronize()
        started = clock()
        network.forward(batch, kept)
        synchronize()
        return clock() - started

    for (length, sequence), kv_cache in kv_caches.items():
        network.forward([synthetic_inputs(1, length, vocab_size, sequence)], [kv_cache])
        yield
    for turn in range(-1, grid.rounds):
        for cell in grid.call_shapes[:: 1 if turn % 2 else -1]:
            spent = seconds(cell, [kv_caches[cell.length, sequence] for sequence in range(cell.batch)])
            if turn >= 0:
                timings.call_seconds.setdefault(cell, []).append(spent)
            yield
        for length in grid.lengths if turn < PREFILL_ROUNDS else ():
            spent = seconds(CallShape(1, length), [network.new_kv_cache()])
            if turn >= 0:
                timings.prefill_seconds.setdefault(length, []).append(spent)
            yield


def synthetic_inputs(nodes: int, length: int, vocab_size: int, sequence: int = 0) -> ForwardInputs:
    """A call of `nodes` nodes, the last decided token included, after a text of `length` arbitrary tokens."""
    tokens = (np.arange(length + nodes - 1, dtype=np.int64) * 7919 + 104729 * (sequence + 1)) % vocab_size
    parents = tuple(-1 if node % PATH_LENGTH == 0 else node - 1 for node in range(nodes - 1))
    open_positions = PATH_LENGTH + 1  # the last is after the deepest node
    return ForwardInputs(continuation(tokens[:length], open_positions), tuple(tokens[length:].tolist()), parents)


def time_statistics(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds: the median, the first and third quartile, and over how many rounds."""
    low, middle, high = [1000 * each for each in quartiles(seconds)]
    return {"ms": middle, "low": low, "high": high, "rounds": len(seconds)}


def quartiles(numbers: Sequence[float]) -> tuple[float, float, float]:
    """The quartiles of one number or more."""
    if len(numbers) == 1:
        return numbers[0], numbers[0], numbers[0]
    low, middle, high = statistics.quantiles(numbers, method="inclusive")
    return low, middle, high


def kv_cache_growth(network: Network, vocab_size: int, context: int | None) -> dict[str, Any]:
    """KV cache entries beyond the decided tokens, after calls of many nodes that are all rejected."""
    kv_cache, text, over = network.new_kv_cache(), synthetic_inputs(1, 32, vocab_size).canvas.decided_prefix, []
    for _ in range(16 if context is None else max(min(16, context - 40), 1)):
        network.forward([ForwardInputs(continuation(text, 2), tuple(range(16)), (-1,) * 16)], [kv_cache])
        over.append(len(kv_cache.tokens) - len(text))
        text = np.append(text, 5)
    return {"slots_over_decided_tokens": max(over)}


class PartTimer:
    """Seconds by part, by replacing functions with timed ones for a while. Time of a nested part does not count for the
    outer one, so that parts add up.

    torch.profiler sees operators of PyTorch, but neither our kernels nor the Python around them.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = {}
        self._active_parts: list[str] = []  # begun and not ended, the innermost last
        self._last_change = 0.0

    def time_function(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time added to `part`."""
        parts, clock = self._active_parts, self.clock

        @wraps(function)
        def run(*args: Any, **settings: Any) -> Any:
            self._add_elapsed(clock())
            parts.append(part)
            try:
                return function(*args, **settings)
            finally:
                self._add_elapsed(clock())
                parts.pop()

        return run

    def reset(self) -> None:
        """Set all times to zero; only while no part is running."""
        assert not self._active_parts, "a part is under way"
        self.seconds = {}

    def _add_elapsed(self, now: float) -> None:
        if self._active_parts:
            part = self._active_parts[-1]
            self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last_change
        self._last_change = now


@contextmanager
def temporarily_replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module, class or object within the context."""
    original = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if original is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
