"""Show the progress of a long fetch: bars on a terminal, lines in a log, nothing in a library."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Column
from rich.text import Text


@dataclass(frozen=True)
class Stage:
    """A stage of a fetch and its progress; `total` is None for stages not measured in bytes."""

    text: str
    done: int = 0  # bytes
    total: int | None = None  # bytes


ProgressCallback = Callable[[Stage], None]


def no_progress(stage: Stage) -> None:
    """Show nothing."""


@contextmanager
def progress_bars(console: Console | None = None) -> Iterator[ProgressCallback]:
    """Show each stage on stderr: bars with bytes, speed and time left on a terminal, else one line a stage."""
    console = console or Console(stderr=True)
    text = TextColumn("{task.description}", markup=False)
    shown = RichProgress(SpinnerColumn(), text, BarColumn(16), _BytesColumn(Column(no_wrap=True)), console=console)
    tasks = {}

    def show(stage: Stage) -> None:
        if stage.text in tasks:
            shown.update(tasks[stage.text], completed=stage.done, total=stage.total)
            return
        for earlier in tasks.values():
            shown.update(earlier, total=1, completed=1, visible=False)
        if console.is_terminal:
            shown.start()
        else:
            console.print(stage.text, markup=False, highlight=False, soft_wrap=True)
        tasks[stage.text] = shown.add_task(stage.text, completed=stage.done, total=stage.total)

    try:
        yield show
    finally:
        if tasks and console.is_terminal:
            shown.stop()


def terminal_progress() -> AbstractContextManager[ProgressCallback]:
    """Bars on stderr if it is a terminal, else nothing."""
    return progress_bars() if sys.stderr.isatty() else nullcontext(no_progress)


class _BytesColumn(ProgressColumn):
    """Bytes done, bytes in all, bytes a second, seconds left."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text(f"{task.elapsed or 0:.0f} s")
        speed, left = task.speed, task.time_remaining
        rate = f", {speed / 1e6:.1f} MB/s" if speed else ""
        rest = f", {left:.0f} s left" if left is not None else ""
        return Text(f"{task.completed / 1e6:.1f}/{task.total / 1e6:.1f} MB{rate}{rest}")
