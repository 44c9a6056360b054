"""Time the parts of a program from outside, by replacing functions with timed ones for a while.

torch.profiler sees operators of PyTorch, but neither our kernels nor the Python around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from saltus.evaluation.profiling.call_timing import Clock

_MISSING = object()

WrapFunction = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""(name of a part, function) → the function, watched."""


class PartTimer:
    """Seconds by part. Time of a nested part does not count for the outer one, so that parts add up."""

    def __init__(self, clock: Clock) -> None:
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
