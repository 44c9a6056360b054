"""Tell what a step costs around the network call: drafting, sampling, deciding, and the loop itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from saltus import writing
from saltus.core import control, decode, forward
from saltus.evaluation.step import Clock, quartiles
from saltus.evaluation.stopwatch import Stopwatch, replaced

NETWORK, DRAFTING, SAMPLING, RULE, REST = PARTS = (
    "network call", "drafting and tree", "sampling", "rule", "Python and the rest",
)  # fmt: skip
PROMPT = "Repeat the following sentence three times: The quick brown fox jumps over the lazy dog."


def loop_parts(
    engine: Any,
    method: str = "lookup",
    temperature: float = 0.0,
    tokens: int = 48,
    rounds: int = 3,
    clock: Clock = time.perf_counter,
    settle: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """Milliseconds of a step by part, mean over the steps after the prefill, of the round whose step is the median.

    The prompt is always the same; `overhead` is how much watching slows a step. Drafting of methods that ask a
    network of their own counts as rest.
    """
    settings = {"method": method, "max_new_tokens": tokens, "temperature": temperature, "ignore_eos": True}

    def write(watch: Stopwatch | None = None) -> tuple[float, int]:
        engine.shelf.kept.clear()  # so that each round reads the prompt itself
        stream = engine.stream(PROMPT, **settings)
        next(stream)
        if watch:
            watch.clear()
        started = clock()
        steps = len(list(stream))
        return clock() - started, steps

    write()
    alone, found = [], []
    for _ in range(rounds):
        seconds, steps = write()
        alone.append(seconds / max(steps, 1))
        watch = Stopwatch(clock)
        with watching(engine, method, watch, settle):
            seconds, steps = write(watch)
        found.append((seconds / max(steps, 1), steps, watch.seconds))
    whole, steps, parts = sorted(found, key=lambda each: each[0])[(len(found) - 1) // 2]
    unprofiled = quartiles(alone)[1]
    ms = {part: 1000 * parts.get(part, 0.0) / max(steps, 1) for part in PARTS[:-1]}
    ms[REST] = 1000 * whole - sum(ms.values())
    return {
        "method": method, "temperature": temperature, "steps": steps, "ms": 1000 * whole,
        "unprofiled_ms": 1000 * unprofiled, "overhead": whole / unprofiled - 1 if unprofiled else None, "parts": ms,
    }  # fmt: skip


@contextmanager
def watching(engine: Any, method: str, watch: Stopwatch, settle: Callable[[], Any]) -> Iterator[None]:
    """Let the loop's parts run on the stopwatch while the context is open."""
    ensemble, network = engine._ensemble(method), engine.network
    call, drafters = network.forward, ensemble.drafters

    def settled(*args: Any, **settings: Any) -> Any:
        replies = call(*args, **settings)
        settle()  # so that a device's time is not taken for that of what reads its answer
        return replies

    rules = {name: watch.timed(RULE, rule) for name, rule in writing.RULES.items()}
    controller = control.Controller
    places = [
        (network, "forward", watch.timed(NETWORK, settled)),
        (ensemble, "drafters", lambda text: [watch.timed(DRAFTING, drafter) for drafter in drafters(text)]),
        (decode, "grow", watch.timed(DRAFTING, decode.grow)),
        (writing, "RULES", rules),
        *((controller, name, watch.timed(DRAFTING, getattr(controller, name))) for name in ("size", "observe")),
        *((forward, name, watch.timed(SAMPLING, getattr(forward, name))) for name in ("law", "choices", "pick")),
    ]
    with ExitStack() as stack:
        for owner, name, value in places:
            stack.enter_context(replaced(owner, name, value))
        yield
