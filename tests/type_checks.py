"""Check types and tensor shapes while the first case of each test runs, and not in its other cases.

`--quick` checks none. jaxtyping's import hook decorates every function of saltus (`--jaxtyping-packages`). A checked
call takes some 0.1 ms, and to wrap a function some ms: it was three quarters of the suite's time. Of each function a
test checks the first calls, and then ever fewer; of a function that many tests call each checks one. Functions made
inside others share a wrapper.
"""

import dataclasses
import functools
import inspect
import threading
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import jaxtyping
import pytest

IS_CHECKED = pytest.StashKey[bool]()
FIRST_CALLS = 3  # of a function in a test, all checked; then the 4th, the 8th, the 16th, …
MANY_CHECKS = 500  # of a function in all tests; then the first call in each test is checked
_checked_test = 0  # the number of the test that runs; 0 where its types are not checked
_num_tests = 0
# By the code of a function, which all that one line makes share: test, calls in it, and checked calls in all tests.
_counts: dict[CodeType, list[int]] = {}
_wrapped = jaxtyping.jaxtyped


def _wrapped_when_checked(*args: Any, **named: Any) -> Any:
    """What jaxtyping's import hook decorates functions by: a function is wrapped in its first checked call."""
    if args:
        return _wrapped(*args, **named)

    def decorate(function: Any) -> Any:
        if isinstance(function, FunctionType):
            return _lazy(function, named)
        if isinstance(function, type) and dataclasses.is_dataclass(function):
            if isinstance(function.__init__, FunctionType):
                function.__init__ = _lazy(function.__init__, named)
            return function
        return _wrapped(function, **named)

    return decorate


def _lazy(function: FunctionType, settings: dict[str, Any]) -> Any:
    wrapped, counts = None, _counts.setdefault(function.__code__, [0, 0, 0])

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        if not _checked_test:
            return function(*args, **named)
        if counts[0] != _checked_test:
            counts[:2] = _checked_test, 0
        counts[1] = count = counts[1] + 1
        if count > 1 and (counts[2] >= MANY_CHECKS or (count > FIRST_CALLS and count & (count - 1))):
            return function(*args, **named)
        counts[2] += 1
        if "<locals>" in function.__qualname__ and not function.__defaults__ and not function.__kwdefaults__:
            return _call_shared(function, settings, args, named)
        nonlocal wrapped
        wrapped = wrapped or _wrapped(function, **settings)
        return wrapped(*args, **named)

    return call


def _call_shared(function: FunctionType, settings: dict[str, Any], args: Any, named: Any) -> Any:
    """A checked call by the wrapper of all functions that one line makes, which differ in what they close over."""
    code, waiting = function.__code__, _waiting.functions
    if code not in _shared:
        stand_in = FunctionType(
            _last_waiting.__code__, function.__globals__, function.__name__, closure=_last_waiting.__closure__
        )
        functools.update_wrapper(stand_in, function)
        stand_in.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        del stand_in.__wrapped__  # which would keep alive what the first of them closes over
        _shared[code] = _wrapped(stand_in, **settings)
    depth = len(waiting)
    waiting.append(function)
    try:
        return _shared[code](*args, **named)
    finally:
        del waiting[depth:]  # it still waits where an argument is of another type


class _Waiting(threading.local):
    """The functions of this thread whose arguments are being checked."""

    def __init__(self) -> None:
        self.functions: list[FunctionType] = []


def _make_last_waiting(waiting: _Waiting) -> FunctionType:
    def last_waiting(*args: Any, **named: Any) -> Any:
        return waiting.functions.pop()(*args, **named)

    return last_waiting  # type: ignore[return-value]


_shared: dict[CodeType, Any] = {}
_waiting = _Waiting()
_last_waiting = _make_last_waiting(_waiting)

jaxtyping.jaxtyped = _wrapped_when_checked  # before anything of saltus is imported
jaxtyping.config.update("jaxtyping_disable", True)


def choose(items: list[pytest.Item]) -> None:
    """The first case of each test is checked, but for tests marked `unchecked`."""
    seen: set[str] = set()
    for item in items:
        name = item.nodeid.partition("[")[0]
        item.stash[IS_CHECKED] = name not in seen and item.get_closest_marker("unchecked") is None
        seen.add(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Around the test and its fixtures."""
    global _checked_test, _num_tests
    _num_tests += 1
    _checked_test = _num_tests if item.stash.get(IS_CHECKED, False) else 0
    jaxtyping.config.update("jaxtyping_disable", not _checked_test)
    try:
        return (yield)
    finally:
        _checked_test = 0
        jaxtyping.config.update("jaxtyping_disable", True)
