"""Evaluate trees on any causal language model of Transformers: many texts, one call, nothing read twice."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from saltus.core.canvas import Canvas
from saltus.core.forward import AUXILIARY, Forward, Reply
from saltus.networks import attention, native
from saltus.networks.attention import Call, Part
from saltus.networks.fixed import WIDTH, Fixed, unfit
from saltus.networks.gated import Adapter, Gate, applied
from saltus.networks.lean import Lean, supports
from saltus.networks.linear import Exact
from saltus.networks.memory import Memory

log = logging.getLogger("saltus")

ROWS = 256  # rows of one call at most, so that a long prompt needs little room
STAND_IN = 0  # token id of an auxiliary query's row, whose embedding another takes the place of


@dataclass
class _Read:
    """What one text adds to a call: rows that read decided tokens, then, in its last one, the tree."""

    text: int
    tokens: list[int]
    part: Part
    wanted: int  # how many of its last rows are asked for logits
    features: bool  # are the features of all its rows wanted?
    uniforms: tuple[float, ...] = ()  # of its last rows, which are auxiliary queries
    guesses: tuple[bool, ...] = ()  # which of these have tokens
    temperature: float = 0.0


@dataclass
class CausalNetwork:
    """A causal model behind Forward and Reply. `free` gives up equal rounding for the library's own attention.

    An adapter, once attached, acts on the rows of auxiliary queries and on no others.
    On CUDA equal rounding comes from fixed shapes, elsewhere from kernels (`shaped` says otherwise, for tests).
    `width` is then the rows of a decoding call, and the depth of a tree at most. `taps` counts layers: the states
    after so many are put before the last ones, where features are asked for.
    """

    model: Any
    free: bool = False
    width: int = WIDTH
    shaped: bool | None = None
    taps: tuple[int, ...] = ()
    layers: int = field(init=False)
    lean: Lean | None = field(init=False, default=None)  # a quicker way through the same model, where there is one
    fixed: Fixed | None = field(init=False, default=None)
    adapter: Adapter | None = field(init=False, default=None)
    busy: threading.Lock = field(init=False, default_factory=threading.Lock)  # a model serves one call at a time
    device: torch.device = field(init=False)  # a model looks through its weights for it, each time

    def __post_init__(self) -> None:
        self.device = self.model.device
        self.model.set_attn_implementation(attention.NAME)
        shaped = not self.free and (self.device.type == "cuda" if self.shaped is None else self.shaped)
        if shaped and (why := unfit(self.model)):
            log.warning("%s: calls round as their shapes have it, and texts may differ by that", why)
            self.free, shaped = True, False
        if not self.free:  # experts as linear layers, which Exact sees; grouped products round by their shapes
            self.model.set_experts_implementation("eager")
        self.model.eval()
        self.layers = self.model.config.get_text_config().num_hidden_layers
        if shaped:
            graphs = self.device.type == "cuda"
            self.fixed = Fixed(self._evaluate, self.layers, self.device, self.width, graphs=graphs)
        elif not self.free and supports(self.model):
            self.lean = Lean(self.model, self.rows)

    any_subset = False  # does it fill holes that have text behind them?

    @property
    def rows(self) -> int:
        """Of one call, at most."""
        return ROWS

    @staticmethod
    def read(canvas: Canvas) -> np.ndarray:
        """The decided tokens that it reads, in the order in which it reads them."""
        return canvas.decided

    def memory(self) -> Any:
        """What is kept of one text between calls."""
        return Memory() if self.fixed is None else self.fixed.memory()

    def attach(self, adapter: Adapter | None) -> None:
        """Serve auxiliary queries by this adapter, as its weights are now. Errors: ValueError if it does not fit."""
        if adapter is not None:
            adapter.check(self.model)
        with self.busy:
            self.adapter = adapter
            if self.lean is not None:
                self.lean.attach(adapter)

    @torch.inference_mode()
    def forward(self, asks: Sequence[Forward], memories: Sequence[Any]) -> list[Reply]:
        """Evaluate every Forward, each on its own memory, in as few calls as ROWS or fixed shapes allow."""
        if any(ask.queries for ask in asks):
            self._can_answer_queries()
        with self.busy:
            if self.fixed is None:
                return self._forward(asks, memories)
            with native.in_charge() if self.device.type == "cpu" else torch.cuda.device(self.device):
                return [self.fixed.forward(ask, memory) for ask, memory in zip(asks, memories, strict=True)]

    def _can_answer_queries(self) -> None:
        if self.fixed is not None:
            raise ValueError(
                "auxiliary queries are not served by fixed shapes (CUDA) yet;"
                " load the model with device='cpu' or exact=False, or draft with another method"
            )
        if self.adapter is None:
            raise ValueError("auxiliary queries need an adapter that was trained for this model; attach one")

    def _forward(self, asks: Sequence[Forward], memories: Sequence[Memory]) -> list[Reply]:
        started = time.perf_counter()
        logits: list[Any] = [None] * len(asks)
        features: list[list[Any]] = [[] for _ in asks]
        read = [len(self.read(ask.canvas)) for ask in asks]
        queue: list[list[_Read]] = []
        for text, (ask, memory) in enumerate(zip(asks, memories, strict=True)):
            past = self._recall(memory, ask)
            read[text] -= past
            queue.append(list(self._reads(text, ask, memory, past)))
        with contextlib.nullcontext() if self.free else native.in_charge():
            while any(queue):
                reads, room = [], self.rows
                for waiting in queue:
                    if waiting and waiting[0].part.rows <= room:
                        reads.append(waiting.pop(0))
                        room -= reads[-1].part.rows
                rows, hidden = self._call(reads)
                for one in reads:
                    if one.wanted:
                        logits[one.text], rows = rows[: one.wanted], rows[one.wanted :]
                    if one.features:
                        features[one.text].append(hidden[: one.part.rows])
                    hidden = hidden[one.part.rows :]
        for ask, memory in zip(asks, memories, strict=True):
            memory.tokens = self.read(ask.canvas).copy()
            memory.tree = ask if ask.tokens else None
        if self.device.type == "cuda":  # so that seconds are those of the call
            torch.cuda.current_stream(self.device).synchronize()
        seconds = time.perf_counter() - started
        rows = sum(read) + sum(len(ask.tokens) for ask in asks)
        return [
            Reply(logits[i], torch.cat(features[i]) if ask.features else None, seconds, read[i], rows)
            for i, ask in enumerate(asks)
        ]

    def _recall(self, memory: Memory, ask: Forward) -> int:
        """How many of the tokens that it would read stand in the memory."""
        return memory.recall(ask.canvas.decided)

    def _reads(self, text: int, ask: Forward, memory: Memory, past: int) -> Iterator[_Read]:
        """What a text must read, in calls."""
        return _reads(text, ask, memory, past)

    def _evaluate(self, tokens: torch.Tensor, positions: torch.Tensor, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and features of the last rows (0: of all); tokens and positions are [1, rows]."""
        exact = Exact() if tokens.device.type == "cpu" else contextlib.nullcontext()
        with self._listen() as heard, exact:
            out = self.model(input_ids=tokens, position_ids=positions, logits_to_keep=last, use_cache=False)
        features = heard()
        return out.logits[0], features[-last:] if last else features

    def _call(self, reads: Sequence[_Read]) -> tuple[torch.Tensor, torch.Tensor]:
        """One call of the model: logits of the wanted rows; features of all rows, where any are wanted."""
        tokens = [token for read in reads for token in read.tokens]
        positions = np.concatenate([read.part.positions for read in reads])
        wanted, end = [], 0
        for read in reads:
            end += len(read.tokens)
            wanted += range(end - read.wanted, end)
        call = Call([read.part for read in reads], self.layers, self.free)
        gate = self._gate(reads)
        features = any(read.features for read in reads)
        device = self.device
        if self.lean is not None:
            rows = torch.tensor(wanted, dtype=torch.long)
            return self.lean(torch.tensor(tokens), torch.from_numpy(positions), call, rows, features, gate, self.taps)
        exact = contextlib.nullcontext() if self.free else Exact()
        gated = applied(self.model, self.adapter, gate) if gate and self.adapter else contextlib.nullcontext()
        with attention.during(call), self._listen() as heard, exact, gated:
            out = self.model(
                input_ids=torch.tensor([tokens], device=device),
                position_ids=torch.from_numpy(positions[None]).to(device),
                logits_to_keep=torch.tensor(wanted, dtype=torch.long, device=device),
                use_cache=False,
            )
        return out.logits[0], heard()

    def _gate(self, reads: Sequence[_Read]) -> Gate | None:
        """Which rows of a call are auxiliary queries, and what they are told."""
        if not any(read.uniforms for read in reads):
            return None
        rows, uniforms, temperatures, guesses, end = [], [], [], [], 0
        for read in reads:
            end += len(read.tokens)
            rows += range(end - len(read.uniforms), end)
            uniforms += read.uniforms
            temperatures += [read.temperature] * len(read.uniforms)
            guesses += read.guesses
        device = self.device
        places, own = torch.tensor(rows, dtype=torch.long, device=device), torch.tensor(guesses, device=device)
        told, warm = (torch.tensor(x, dtype=torch.float64, device=device) for x in (uniforms, temperatures))
        return Gate(places, told, warm, own)

    def tap(self, taps: Sequence[int]) -> None:
        """Add layers whose states are features, while no text is being written. Errors: ValueError: no such layers."""
        if any(not 0 < tap < self.layers for tap in taps):
            raise ValueError(f"features are wanted after {max(taps)} layers, but the model has {self.layers}")
        with self.busy:
            if self.fixed is not None and not set(taps) <= set(self.taps):
                self.fixed.free.clear()  # seats, with graphs of calls that gave out fewer features
            self.taps = tuple(sorted({*self.taps, *taps}))

    def _listen(self) -> _Ear:
        return _Ear(self.model.get_decoder(), self.taps)


class _Ear:
    """Hear the states that a decoder's layers give out while the context is open: those tapped, and the last."""

    def __init__(self, decoder: torch.nn.Module, taps: Sequence[int]) -> None:
        self.decoder, self.taps = decoder, taps
        self.heard: list[torch.Tensor] = []

    def __enter__(self) -> Callable[[], torch.Tensor]:
        layers = _layers(self.decoder) if self.taps else ()
        self.hooks = [layers[tap - 1].register_forward_hook(self._hear) for tap in self.taps]
        self.hooks.append(self.decoder.register_forward_hook(self._hear))
        return lambda: torch.cat(self.heard, -1)[0] if self.taps else self.heard[0][0]

    def _hear(self, module: Any, inputs: Any, out: Any) -> None:
        out = getattr(out, "last_hidden_state", out)
        self.heard.append(out[0] if isinstance(out, tuple) else out)

    def __exit__(self, *_) -> None:
        for hook in self.hooks:
            hook.remove()


def _layers(decoder: torch.nn.Module) -> torch.nn.ModuleList:
    """The decoder's layers, whatever its authors call them."""
    lists = [module for module in decoder.children() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len)


def _reads(text: int, ask: Forward, memory: Memory, past: int) -> Iterator[_Read]:
    """Cut what a text must read into calls: decided tokens ROWS at a time, the tree with the last of them."""
    decided, nodes = ask.canvas.decided, len(ask.tokens)
    assert nodes < ROWS
    while (unread := len(decided) - past) + nodes > ROWS:
        count = min(ROWS, unread - 1)
        yield _Read(
            text, decided[past : past + count].tolist(), _part(memory, past, count, ask, tree=False), 0, ask.features
        )
        past += count
    tokens = decided[past:].tolist() + [token if token != AUXILIARY else STAND_IN for token in ask.tokens]
    uniforms = tuple(u for u in ask.uniforms or () if u is not None)
    guesses = tuple(ask.tokens[query] != AUXILIARY for query in ask.queries)
    part = _part(memory, past, unread, ask, tree=True)
    yield _Read(text, tokens, part, nodes + 1, ask.features, uniforms, guesses, ask.temperature)


def _part(memory: Memory, past: int, unread: int, ask: Forward, tree: bool) -> Part:
    nodes = len(ask.tokens) if tree else 0
    visible = np.zeros((unread + nodes, unread + nodes), dtype=np.uint8)
    visible[:unread, :unread] = np.tri(unread, dtype=np.uint8)
    for node in range(nodes):
        row = unread + node
        visible[row] = visible[ask.parents[node] + unread]  # parent −1 is the last decided token, one row before
        visible[row, row] = 1
    positions = np.arange(past, past + unread + nodes)
    if nodes:
        positions[unread:] = past + unread + np.array(ask.depths)
    return Part(memory, past, positions, visible)
