"""Follow a training run: in words on the screen, and in curves for TensorBoard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any


def writer() -> Callable[..., Any]:
    """What writes for TensorBoard. Errors: ValueError where that is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # pyright: ignore[reportPrivateImportUsage]
    except ImportError:
        raise ValueError("training needs tensorboard for its curves; pip install 'saltus[train]'") from None
    return SummaryWriter


class Curves:
    """The curves of a run: on the screen in words, and in a folder for TensorBoard."""

    def __init__(self, writer: Callable[..., Any], folder: Path, queries: int) -> None:
        self.writer, self.folder, self.queries = writer, folder, queries
        self.file: Any = None
        self.at, self.loss, self.speed = 0, 0.0, 0.0
        self.found: dict[str, float] = {}

    def step(self, step: int, loss: float) -> None:
        """A step is done. What a killed run has told of it and later ones is purged."""
        if self.file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file, self.began, self.first = self.writer(str(self.folder), purge_step=step), monotonic(), step
        elif step > self.first:
            self.speed = self.queries * (step - self.first) / (monotonic() - self.began)
        self.at, self.loss = step, loss
        self.file.add_scalar("loss", loss, step)

    def checkpoint(self, progress: Any) -> None:
        """An examination's findings."""
        self.found = {name: value for name, value in progress.found.items() if value == value}
        for name, value in self.found.items():
            self.file.add_scalar(f"held-out tokens per call/{name}", value, progress.step)
        self.file.add_scalar("query tokens per second", self.speed, progress.step)
        self.file.flush()

    @property
    def words(self) -> str:
        found = "".join(f" · {name} {value:.2f} a call" for name, value in self.found.items())
        return f"loss {self.loss:.3f}{found} · {self.speed:,.0f} query tokens/s"

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
