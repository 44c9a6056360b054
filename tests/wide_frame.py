"""Run tests where no call crosses the end of a chunk of CPython's stack, which would map and unmap memory.

CPython keeps Python frames in chunks of 16 KB. A loop that calls functions where a chunk ends gets and frees the next
one in every call, which makes it up to a hundred times slower. It depends on the depth, so that tests of Triton's
interpreter took three times as long by chance. A frame of a hundred thousand variables gets a chunk of 1 MB, and leaves
200 KB for what it calls.
"""

from collections.abc import Callable
from typing import Any

import pytest

VARIABLES = 100_000


def _function_with_many_variables() -> Callable[[Callable[[], Any]], Any]:
    names = "=".join(f"a{number}" for number in range(VARIABLES))
    made: dict[str, Any] = {}
    exec(f"def call(work):\n    if False:\n        {names} = 0\n    return work()", made)
    return made["call"]


def install(config: pytest.Config) -> None:
    """Let the loop over the tests run below such a frame."""
    call, hook = _function_with_many_variables(), config.hook.pytest_runtestloop
    own = hook._hookexec  # what a hook runs its functions by
    hook._hookexec = lambda *given: call(lambda: own(*given))
