"""Progress on stderr: bars on a terminal, and for what takes hours, lines in a log."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from time import monotonic
from typing import Any

SECONDS_BETWEEN_LINES = 60.0


@contextmanager
def progress_bar(total: int, description: str) -> Iterator[Callable[[], Any]]:
    """Entering gives a function that advances the bar by one."""
    steps = count(1)
    with progress_meter(total, description) as show:
        yield lambda: show(next(steps))


@contextmanager
def _progress_lines(total: int, description: str) -> Iterator[Callable[..., None]]:
    """Entering gives a function that prints how many are done, at most once a minute."""
    from saltus.cli.answers import print_note

    printed = monotonic()

    def show(done: int, words: str = "") -> None:
        nonlocal printed
        if monotonic() - printed >= SECONDS_BETWEEN_LINES:
            printed = monotonic()
            print_note(f"{description}: {done:,} of {total:,}{', ' * bool(words)}{words}")

    yield show


def progress_meter(total: int, description: str, live: bool = True, in_logs: bool = False) -> Any:
    """Entering gives a function that sets how many are done, and a text.

    The bar is drawn only then, so it costs no other time. Where stderr is no terminal, it is a line a minute `in_logs`.
    """
    if live and in_logs and not sys.stderr.isatty():
        return _progress_lines(total, description)
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
