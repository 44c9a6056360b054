"""Write texts of tokens with a method: seats for many, records of each call, and what was learned of the costs."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from saltus.core.canvas import Canvas, continuation
from saltus.core.control import Acceptance, Controller, Costs
from saltus.core.decode import Drafter, Network, Seat, rounds, speculate
from saltus.core.forward import Forward, Reply, Step, Writer
from saltus.core.noise import Noise
from saltus.core.rules import RULES
from saltus.core.sampling import Sampling, log_probability
from saltus.methods import Method

SIZES = (1, 2, 4, 8, 16, 32)  # rows of the calls that are timed


@dataclass(frozen=True)
class Call:
    """What a call of the target did for a text."""

    index: int
    tokens: tuple[int, ...]  # decided by it
    nodes: int  # drafted tokens that it checked
    seconds: float  # wall time, of the whole batch where there is one
    read: int  # decided tokens that it read: the prompt, at first
    closed: int = 0  # of the tokens, those that follow from the one before them, which closed a hole


@dataclass
class Text:
    """One text to write: what is asked for, and what came of it."""

    prompt: Sequence[int]
    length: int  # tokens to write at most
    seed: int
    sampling: Sampling
    ends: Callable[[int], bool] = lambda token: False  # told each token in turn: does the text end with it?
    logprobs: bool = False
    holes: Canvas | None = None  # what is to be filled, where that is not a continuation of the prompt
    calls: list[Call] = field(default_factory=list, init=False)
    log_probabilities: list[float] = field(default_factory=list, init=False)
    asked: Counter[str] = field(default_factory=Counter, init=False)  # calls by network
    seconds: float = field(default=0.0, init=False)
    ended: bool = field(default=False, init=False)  # by its own decision

    @property
    def tokens(self) -> list[int]:
        return [token for call in self.calls for token in call.tokens]

    @property
    def finished(self) -> bool:
        return self.ended or sum(len(call.tokens) for call in self.calls) >= self.length

    def stop(self, canvas: Canvas, tokens: np.ndarray) -> int | None:
        for count, token in enumerate(tokens.tolist(), start=1):
            if self.ends(token):
                self.ended = True
                return count
        return None

    def record(self, step: Step) -> None:
        tokens = tuple(step.tokens.tolist())
        counted = step.asked.drafts, step.reply.seconds, step.reply.read, step.closed
        self.calls.append(Call(len(self.calls), tokens, *counted))
        if self.logprobs:
            decided = tokens[: len(tokens) - step.closed]
            rows = [0, *(node + 1 for node in _ancestry(step))]
            self.log_probabilities += [
                log_probability(step.reply.logits[row], token) for row, token in zip(rows, decided, strict=False)
            ]
            self.log_probabilities += [0.0] * step.closed


def _ancestry(step: Step) -> list[int]:
    """The accepted nodes, first to last."""
    nodes, node = [], step.node
    while node >= 0:
        nodes.append(node)
        node = step.asked.parents[node]
    return nodes[::-1]


@dataclass
class Ensemble:
    """Methods, the networks that they use, and what was learned about both."""

    methods: Sequence[Method]
    networks: Mapping[str, Network]  # "target", and those of the methods' own
    rule: str = "match"
    budget: int = 16  # nodes of a call
    adaptive: bool = True
    contexts: Mapping[str, int | None] = field(default_factory=dict)  # tokens that a method's own network reads
    costs: Costs = field(default_factory=Costs)
    acceptance: Acceptance = field(default_factory=Acceptance)
    controllers: dict[int, Controller] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Errors: ValueError where a method drafts by a model that fills holes anywhere, and the target is none."""
        wants = any(getattr(method, "any_subset", False) for method in self.methods)
        if wants and not getattr(self.networks["target"], "any_subset", True):
            raise ValueError(
                "assd drafts by a model that fills holes anywhere, but this one writes from left to right; take another"
                " model, such as stories, or the option assd.draft=bigram"
            )

    def drafters(self, text: Text) -> list[Drafter]:
        made = []
        for method in self.methods:
            drafter = method.drafter(Noise(text.seed), text.sampling, RULES[self.rule])
            limits = [limit for name in method.models if (limit := self.contexts.get(name)) is not None]
            if drafter is not None:
                made.append(_within(min(limits), drafter) if limits else drafter)
        return made

    def controller(self, texts: int) -> Controller:
        """Shared over texts where it cannot touch them; by `reject` the tree has a say, so its size is fixed."""
        if self.rule != "match" or not self.adaptive:
            return Controller(self.budget, adaptive=False)
        if not self.costs.seconds:
            self.costs.seconds.update(calibrate(self.networks["target"]))
        if texts not in self.controllers:  # a node more for each of the texts
            costs = self.costs if texts == 1 else Costs({rows: self.costs.of(rows * texts) for rows in SIZES})
            self.controllers[texts] = Controller(self.budget, True, self.acceptance, costs)
        return self.controllers[texts]


@dataclass
class Shelf:
    """The memories of the latest texts, for the next turn of a conversation. It begins with all that was said."""

    texts: int = 4
    room: int = 2**30  # bytes; the latest text is kept whatever it takes
    kept: list[tuple[int, dict[str, Any]]] = field(
        default_factory=list
    )  # (tokens of the prompt, memories), oldest first

    def put(self, prompt: Sequence[int], memories: dict[str, Any]) -> None:
        if "target" in memories:
            self.kept.append((len(prompt), memories))
        while len(self.kept) > self.texts or (len(self.kept) > 1 and self._size() > self.room):
            del self.kept[0]

    def _size(self) -> int:
        return sum(_bytes(memory) for _, memories in self.kept for memory in memories.values())

    def take(self, prompt: Sequence[int]) -> dict[str, Any]:
        """The memories that share most with the prompt, if it goes beyond theirs; a mere repetition is read afresh."""
        best, most = None, 0
        for entry in self.kept:
            shared = _shared(entry[1]["target"].tokens, np.asarray(prompt))
            if shared > max(entry[0], most):
                best, most = entry, shared
        if best is None:
            return {}
        self.kept = [entry for entry in self.kept if entry is not best]
        return best[1]


def write(
    ensemble: Ensemble, texts: Sequence[Text], batch_size: int = 16, shelf: Shelf | None = None
) -> Generator[None]:
    """Write all texts, `batch_size` at once, others joining as seats free; yields after each round of calls."""
    waiting = deque(text for text in texts if text.length > 0)
    drafting = bool(waiting and ensemble.drafters(waiting[0]))
    together = 1 << (min(len(waiting), batch_size) - 1).bit_length() if waiting else 1
    controller = ensemble.controller(together) if drafting else Controller(ensemble.budget, adaptive=False)
    seats: list[Seat] = []
    live: list[tuple[Seat, Text]] = []

    def sit_down() -> None:
        while waiting and len(seats) < batch_size:
            text = waiting.popleft()
            writer = _writer(ensemble, text, controller)
            live.append((Seat(writer, shelf.take(text.prompt) if shelf else {}), text))
            seats.append(live[-1][0])

    def leave(seat: Seat, text: Text) -> None:
        live.remove((seat, text))
        if shelf:
            shelf.put(text.prompt, seat.memories)

    sit_down()
    started = time.perf_counter()
    for _ in rounds(seats, ensemble.networks):
        spent = time.perf_counter() - started
        for seat, text in list(live):
            text.seconds += spent
            if seat.ask is None:
                leave(seat, text)
        sit_down()
        try:
            yield
        except GeneratorExit:  # between calls every memory is sound
            for seat, text in list(live):
                leave(seat, text)
            raise
        started = time.perf_counter()


def _writer(ensemble: Ensemble, text: Text, controller: Controller) -> Writer:
    """`speculate`, and a count of what is asked of each network."""
    canvas = continuation(text.prompt, text.length) if text.holes is None else text.holes
    drafters, rule = ensemble.drafters(text), RULES[ensemble.rule]
    noise = Noise(text.seed)
    writer = speculate(canvas, noise, text.sampling, drafters, text.record, rule, controller, text.stop)
    reply: Reply | None = None
    while True:
        try:
            asked = next(writer) if reply is None else writer.send(reply)
        except StopIteration:
            return
        text.asked[asked.to] += 1
        reply = yield asked


def _within(context: int, drafter: Drafter) -> Drafter:
    """Rest where the text outgrows what the drafter's own network reads."""
    return lambda canvas, last, room: drafter(canvas, last, room) if len(canvas.decided) + room <= context else ()


def _bytes(memory: Any) -> int:
    """Of keys and values."""
    tensors = getattr(memory, "keys", None), getattr(memory, "values", None)
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


def checked_rule(name: str) -> str:
    """The name of a rule, or a ValueError."""
    if name not in RULES:
        raise ValueError(f"rule is {name!r}, but must be one of {', '.join(RULES)}")
    return name


def calibrate(network: Network) -> dict[int, float]:
    """Seconds of a call by its rows next to a short text: the best of three, since noise only adds."""
    memory = network.memory()
    vocab = network.forward([Forward(continuation([0], 1))], [memory])[0].logits.shape[-1]
    canvas = continuation(np.arange(48) % vocab, 2)

    def seconds(rows: int) -> float:
        nodes = np.arange(rows - 1) % vocab
        ask = Forward(canvas, tuple(nodes.tolist()), (-1,) * len(nodes))
        return network.forward([ask], [memory])[0].seconds

    seconds(max(SIZES))
    turns = [[seconds(rows) for rows in SIZES] for _ in range(3)]
    return dict(zip(SIZES, map(min, *turns), strict=True))
