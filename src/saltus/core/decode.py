"""Write a text: propose, ask, decide, until no hole is left. The one loop of every method."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from saltus.core.canvas import Canvas
from saltus.core.control import Controller
from saltus.core.forward import Forward, Laws, Reply, Step, Writer
from saltus.core.noise import Noise
from saltus.core.rules import Rule, match
from saltus.core.sampling import Sampling
from saltus.core.tree import Branch, grow

CATCHING_UP = 32  # decided tokens read by a drafter's call that is more than drafting

Offer = Sequence[Branch] | Generator[Forward, Reply, Sequence[Branch]]
"""Branches, or a generator that asks a drafter's own network for them."""


@runtime_checkable
class Drafter(Protocol):
    """Offer branches that continue the canvas. `last` is the step before, None at first; `room` bounds the depth."""

    def __call__(self, canvas: Canvas, last: Step | None, room: int) -> Offer: ...


@runtime_checkable
class Rides(Protocol):
    """A drafter that drafts in the call that verifies: it hangs queries into the tree before it is asked."""

    def ride(self, asked: Forward, chances: Sequence[float], controller: Controller) -> Forward: ...


@runtime_checkable
class Listens(Protocol):
    """A drafter that may want the target's states: calls then give out features."""

    features: bool


@runtime_checkable
class Network(Protocol):
    """What evaluates Forwards. A memory is what it keeps of one text between calls."""

    def memory(self) -> Any: ...

    def forward(self, asks: Sequence[Forward], memories: Sequence[Any]) -> list[Reply]: ...


Stop = Callable[[Canvas, np.ndarray], int | None]
"""Told the canvas and the tokens just decided: how many of them to keep if the text ends there, else None."""


def speculate(
    canvas: Canvas,
    noise: Noise,
    sampling: Sampling,
    drafters: Sequence[Drafter],
    on_step: Callable[[Step], None],
    rule: Rule = match,
    controller: Controller | None = None,
    stop: Stop | None = None,
) -> Writer:
    """Write one text. Under `match` neither drafters nor controller can change it (PTP, Alg. 1 with any draft)."""
    controller = controller or Controller(adaptive=False)
    features = any(isinstance(drafter, Listens) and drafter.features for drafter in drafters)
    riders = [drafter for drafter in drafters if isinstance(drafter, Rides)]
    last: Step | None = None
    while len(canvas.open):
        room = min(len(canvas.open) - 1, controller.budget)  # the law after the last node decides one hole more
        branches: list[Branch] = []
        drafting = 0.0
        awake = controller.drafts()
        for drafter in drafters if room else ():
            offer = drafter(canvas, last, room)
            if isinstance(offer, Generator):
                offer, seconds = (yield from _timed(offer)) if awake else ((), 0.0)
                drafting += seconds
            branches += offer
        offered = grow(branches, controller.budget, room, controller.calibrated, controller.invest)
        tree = offered.cut(controller.size(offered))
        laws = tree.laws if any(tree.laws) else None
        asked = Forward(canvas, tree.tokens, tree.parents, features, drafted=laws)
        for rider in riders:
            chances = [controller.calibrated(*one) for one in zip(tree.sources, tree.chances, strict=True)]
            asked = rider.ride(asked, chances, controller)
        reply = yield asked
        laws = Laws(asked, reply, sampling, noise)
        tokens, node = rule(asked, laws)
        closed = laws.closed(tokens) if sampling.closing else 0
        tokens = np.append(tokens, tokens[-1:].repeat(closed))
        end = stop(canvas, tokens) if stop else None
        closed = closed if end is None else max(closed - (len(tokens) - end), 0)
        last = Step(canvas, asked, reply, laws, tokens[:end], node, closed)
        controller.observe(offered, last, drafting)
        canvas = canvas.fill(last.tokens)
        on_step(last)
        if end is not None:
            return


def _timed(offer: Generator[Forward, Reply, Sequence[Branch]]) -> Generator[Forward, Reply, tuple[Any, float]]:
    """Pass a drafter's questions on, and add up what they cost; catching up on a prompt or a rest is not counted."""
    seconds = 0.0
    try:
        asked = next(offer)
        while True:
            reply = yield asked
            seconds += reply.seconds if reply.read <= CATCHING_UP else 0.0
            asked = offer.send(reply)
    except StopIteration as end:
        return end.value, seconds


@dataclass
class Seat:
    """One live text: its writer, what it asks, and its memory on each network."""

    writer: Writer
    memories: dict[str, Any] = field(default_factory=dict)
    ask: Forward | None = None

    def advance(self, reply: Reply | None) -> bool:
        """Hand the reply over and learn what is asked next; False when the text is finished."""
        try:
            self.ask = next(self.writer) if reply is None else self.writer.send(reply)
        except StopIteration:
            self.ask = None
        return self.ask is not None


def rounds(seats: list[Seat], networks: Mapping[str, Network]) -> Iterator[None]:
    """Serve all seats, one call a network and round, until every text is finished; yields after each round.

    Seats may be added between rounds; finished ones leave. No method knows how many texts there are.
    """
    while True:
        seats[:] = [seat for seat in seats if seat.ask is not None or seat.advance(None)]
        if not seats:
            return
        for name, network in networks.items():
            asking = [seat for seat in seats if seat.ask is not None and seat.ask.to == name]
            if not asking:
                continue
            for seat in asking:
                if name not in seat.memories:
                    seat.memories[name] = network.memory()
            asks = [seat.ask for seat in asking if seat.ask is not None]
            replies = network.forward(asks, [seat.memories[name] for seat in asking])
            for seat, reply in zip(asking, replies, strict=True):
                seat.advance(reply)
        seats[:] = [seat for seat in seats if seat.ask is not None]
        yield


def run(writer: Writer, networks: Mapping[str, Network]) -> None:
    """Write one text to its end."""
    for _ in rounds([Seat(writer)], networks):
        pass
