"""Prepare requests off the event loop: a few at a time, and large ones one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from saltus.core.out_of_memory import is_out_of_memory
from saltus.server.allocator import return_free_memory
from saltus.server.errors import as_api_error

AT_ONCE = 2
LARGE_BYTES = 2**17  # of a body: a tenth of a second; to tokenise it may take 200 times as much memory

Prepare = Callable[..., Coroutine[Any, Any, Any]]
"""Calls a function with arguments on a thread. To cancel it before it has begun is to drop it."""


class Workers:
    """Threads that tokenise prompts, compile grammars, and load draft networks."""

    def __init__(self) -> None:
        self.small = ThreadPoolExecutor(AT_ONCE, "saltus-prepare")
        self.large = ThreadPoolExecutor(1, "saltus-prepare-large")  # so that no small one waits for them

        self.loading = ThreadPoolExecutor(1, "saltus-load")  # takes seconds, in which others are prepared

    async def load(self, make: Callable[..., Any], *given: Any) -> Any:
        """`make(*given)` on the thread that loads networks, one at a time. Errors: ApiError 503 without memory."""
        return await _run(self.loading, make, *given)

    def of_body(self, num_bytes: int) -> Prepare:
        """What prepares a request with such a body."""
        return partial(_run, self.small) if num_bytes < LARGE_BYTES else partial(_run, self.large, _then_return_memory)

    def close(self) -> None:
        """Drop what has not begun."""
        self.small.shutdown(wait=False, cancel_futures=True)
        self.large.shutdown(wait=False, cancel_futures=True)
        self.loading.shutdown(wait=False, cancel_futures=True)


async def _run(pool: ThreadPoolExecutor, make: Callable[..., Any], *given: Any) -> Any:
    """`make(*given)` on a thread of the pool. Errors: ApiError 503 without memory."""
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, make, *given)
    except Exception as error:
        if is_out_of_memory(error):
            raise as_api_error(error) from error
        raise


def _then_return_memory(make: Callable[..., Any], *given: Any) -> Any:
    try:
        return make(*given)
    finally:
        return_free_memory()
