"""The progress of a training run: a line on the screen, and curves for TensorBoard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any


def summary_writer() -> Callable[..., Any]:
    """The class that writes for TensorBoard. Errors: ValueError if it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # pyright: ignore[reportPrivateImportUsage]
    except ImportError:
        raise ValueError("training needs tensorboard for its curves; pip install '.[train]' in the clone") from None
    return SummaryWriter


class TrainingLog:
    """The curves of a run, in a folder for TensorBoard, and its status line."""

    def __init__(self, writer: Callable[..., Any], folder: Path, task: Any) -> None:
        self.make_writer, self.folder, self.task = writer, folder, task
        self.summary: Any = None
        self.last_step, self.loss, self.queries_per_second = 0, 0.0, 0.0
        self.metrics: dict[str, float] = {}
        self.accuracy_by_depth: dict[str, list[float]] = {}

    def step(self, step: int, loss: float) -> None:
        """Record a step. Records of a killed run for this and later steps are purged."""
        if self.summary is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.summary = self.make_writer(str(self.folder), purge_step=step)
            self.start_time, self.first_step = monotonic(), step
        elif step > self.first_step:
            self.queries_per_second = (
                self.task.queries_per_step * (step - self.first_step) / (monotonic() - self.start_time)
            )
        self.last_step, self.loss = step, loss
        self.summary.add_scalar("loss", loss, step)

    def checkpoint(self, progress: Any) -> None:
        """Record the metrics of a checkpoint."""
        self.metrics = {name: value for name, value in progress.metrics.items() if value == value}
        for name, value in self.metrics.items():
            self.summary.add_scalar(f"{self.task.metrics_name}/{name}", value, progress.step)
        self.accuracy_by_depth = progress.accuracy_by_depth
        for name, shares in self.accuracy_by_depth.items():
            for depth, share in enumerate(shares):
                self.summary.add_scalar(f"accuracy by depth, {name}/{depth}", share, progress.step)
        if self.task.queries_per_step:
            self.summary.add_scalar("query tokens per second", self.queries_per_second, progress.step)
        self.summary.flush()

    @property
    def status_line(self) -> str:
        metrics = "".join(f" · {name} {value:.2f}{self.task.metrics_unit}" for name, value in self.metrics.items())
        query = self.task.first_conditioned_query
        right = ", ".join(f"{shares[query]:.2f} by {name}" for name, shares in self.accuracy_by_depth.items())
        metrics += f" · {('first', 'second')[query]} query right {right}" if right else ""
        rate = f" · {self.queries_per_second:,.0f} query tokens/s" if self.task.queries_per_step else ""
        return f"loss {self.loss:.3f}{metrics}{rate}"

    def close(self) -> None:
        if self.summary is not None:
            self.summary.close()
