"""Check types and tensor shapes while the first case of each test runs, and not in its other cases.

jaxtyping wraps every function of saltus where it is imported (`--jaxtyping-packages`). A checked call takes some
0.1 ms, and a function made inside another is wrapped anew each time: checks of all calls were three quarters of the
suite's time.
"""

from collections.abc import Iterator
from typing import Any

import jaxtyping
import pytest

IS_CHECKED = pytest.StashKey[bool]()
_wrapped = jaxtyping.jaxtyped


def install() -> None:
    """Check nothing, until a test asks for it."""
    jaxtyping.jaxtyped = _for_local_functions_if_on
    jaxtyping.config.update("jaxtyping_disable", True)


def _for_local_functions_if_on(*args: Any, **named: Any) -> Any:
    """What jaxtyping's import hook decorates functions by; those of a module are wrapped also while checks are off."""
    if args:
        return _wrapped(*args, **named)

    def decorate(function: Any) -> Any:
        is_local = "<locals>" in getattr(function, "__qualname__", "")
        return function if is_local and jaxtyping.config.jaxtyping_disable else _wrapped(function, **named)

    return decorate


def choose(items: list[pytest.Item]) -> None:
    """The first case of each test is checked, but for tests marked `unchecked`."""
    seen: set[str] = set()
    for item in items:
        name = item.nodeid.partition("[")[0]
        item.stash[IS_CHECKED] = name not in seen and "unchecked" not in item.keywords
        seen.add(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Around the test and its fixtures."""
    jaxtyping.config.update("jaxtyping_disable", not item.stash[IS_CHECKED])
    try:
        return (yield)
    finally:
        jaxtyping.config.update("jaxtyping_disable", True)
