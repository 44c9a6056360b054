"""Progress bars on stderr, if it is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any


@contextmanager
def progress_bar(total: int, description: str) -> Iterator[Callable[[], Any]]:
    """Entering gives a function that advances the bar by one."""
    steps = count(1)
    with progress_meter(total, description) as show:
        yield lambda: show(next(steps))


def progress_meter(total: int, description: str, live: bool = True) -> Any:
    """Entering gives a function that sets how many are done, and a text.

    The bar is drawn only then, so it costs no other time.
    """
    if not (live and sys.stderr.isatty()):
        return nullcontext(lambda done, words="": None)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    class Meter(Progress):
        """A bar with a text."""

        def __enter__(self) -> Any:
            super().__enter__()
            task = self.add_task(description, total=total, words="")
            self.refresh()

            def update(done: int, words: str = "") -> None:
                self.update(task, completed=done, words=words)
                self.refresh()

            return update

    words = TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TextColumn("{task.fields[words]}")
    return Meter(*words, TimeRemainingColumn(), console=Console(stderr=True), auto_refresh=False, transient=True)
