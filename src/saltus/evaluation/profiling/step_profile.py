"""Split the time of a decoding step: network call, drafting, sampling, verification, and the loop itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import isfunction
from typing import Any

from saltus.core import distributions, rules
from saltus.core.control import controller
from saltus.engine import scheduler
from saltus.evaluation.profiling.call_timing import PartTimer, quartiles, temporarily_replaced

NETWORK, DRAFTING, SAMPLING, RULE, REST = PARTS = (
    "network call", "drafting and tree", "sampling", "rule", "Python and the rest",
)  # fmt: skip
PROMPT = "Repeat the following sentence three times: The quick brown fox jumps over the lazy dog."


def profile_step(
    engine: Any,
    method: str = "lookup",
    temperature: float = 0.0,
    max_new_tokens: int = 48,
    rounds: int = 3,
    synchronize: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """Milliseconds of a step by part, mean over the steps after the prefill, of the round whose step is the median.

    The prompt is always the same; `overhead` is how much the measurement slows a step. Calls of draft models count as
    rest.
    """
    settings = {"method": method, "max_new_tokens": max_new_tokens, "temperature": temperature, "ignore_eos": True}

    def write(watch: PartTimer | None = None) -> tuple[float, int]:
        engine.decoder.prefix_tree.clear()  # each round reads the prompt itself
        stream = engine.stream(PROMPT, **settings)
        next(stream)
        if watch:
            watch.reset()
        started = time.perf_counter()
        steps = len(list(stream))
        return time.perf_counter() - started, steps

    write()
    alone, profiled = [], []
    for _ in range(rounds):
        seconds, steps = write()
        alone.append(seconds / max(steps, 1))
        watch = PartTimer()
        with instrumented(engine, method, watch, synchronize):
            seconds, steps = write(watch)
        profiled.append((seconds / max(steps, 1), steps, watch.seconds))
    whole, steps, parts = sorted(profiled, key=lambda each: each[0])[(len(profiled) - 1) // 2]
    unprofiled = quartiles(alone)[1]
    ms = {part: 1000 * parts.get(part, 0.0) / max(steps, 1) for part in PARTS[:-1]}
    ms[REST] = 1000 * whole - sum(ms.values())
    return {
        "method": method, "temperature": temperature, "steps": steps, "ms": 1000 * whole,
        "unprofiled_ms": 1000 * unprofiled, "overhead": whole / unprofiled - 1 if unprofiled else None, "parts": ms,
    }  # fmt: skip


@contextmanager
def instrumented(engine: Any, method: str, timer: PartTimer, synchronize: Callable[[], Any]) -> Iterator[None]:
    """Within the context, time the parts of the loop."""
    ensemble, network = engine.decoder.setup(method), engine.network
    call, drafters = network.forward, ensemble.new_drafters

    def settled(*args: Any, **settings: Any) -> Any:
        batch_outputs = call(*args, **settings)
        synchronize()  # the device's time must not count for the code that reads its results
        return batch_outputs

    timed_rules = {name: timer.time_function(RULE, rule) for name, rule in scheduler.RULES.items()}
    controller_class = controller.Controller
    places = [
        (network, "forward", timer.time_function(NETWORK, settled)),
        (ensemble, "new_drafters", lambda text: [_timed_drafter(timer, drafter) for drafter in drafters(text)]),
        (scheduler, "RULES", timed_rules),
        (rules, "followed_tokens", timer.time_function(SAMPLING, rules.followed_tokens)),
        *(
            (controller_class, name, timer.time_function(DRAFTING, getattr(controller_class, name)))
            for name in ("offered_tree", "num_nodes", "record")
        ),
        *(
            (distributions, name, timer.time_function(SAMPLING, getattr(distributions, name)))
            for name in ("token_distribution", "greedy_tokens", "pick_token", "gumbel_max_token")
        ),
    ]
    with ExitStack() as stack:
        for owner, name, value in places:
            stack.enter_context(temporarily_replaced(owner, name, value))
        yield


def _timed_drafter(timer: PartTimer, drafter: Any) -> Any:
    """The drafter, with its calls timed. It stays of its own class, by which the loop knows what it needs."""
    if isfunction(drafter):
        return timer.time_function(DRAFTING, drafter)
    kind = type(drafter)
    timed = type(kind.__name__, (kind,), {"__call__": timer.time_function(DRAFTING, kind.__call__)})
    object.__setattr__(drafter, "__class__", timed)
    return drafter
