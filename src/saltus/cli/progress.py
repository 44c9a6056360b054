"""Progress bars on stderr, if it is a terminal."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any


def progress_bar(total: int, description: str) -> Any:
    """Entering gives a function that advances the bar. It is drawn only when advanced, so it costs no other time."""
    if not sys.stderr.isatty():
        return nullcontext(lambda: None)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    class Bar(Progress):
        """A bar that is drawn on request."""

        def __enter__(self) -> Any:
            super().__enter__()
            task = self.add_task(description, total=total)
            self.refresh()

            def advance() -> None:
                self.advance(task)
                self.refresh()

            return advance

    columns = TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn()
    return Bar(*columns, console=Console(stderr=True), auto_refresh=False, transient=True)


def progress_meter(total: int, description: str, live: bool = True) -> Any:
    """Entering gives a function that sets how many are done, and a text; the bar is drawn only then."""
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
