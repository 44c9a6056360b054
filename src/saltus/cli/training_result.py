"""The end of `saltus train`: what was measured, and the commands that decode with the result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any


def print_result(folder: Path, trained: Sequence[tuple[Any, dict[str, Any]]], run: Any) -> None:
    """Print where the result of a run is, its metrics, and the commands."""
    from saltus.cli.answers import print_note
    from saltus.training.training_task import TOKENS_PER_CALL

    line, is_useless = f"written: {folder}", False
    for task, results in trained:
        metrics = results["metrics"]
        if metrics:
            line += f"; {task.metrics_name}: " + ", ".join(f"{name} {value:.2f}" for name, value in metrics.items())
        is_useless |= task.metrics_name == TOKENS_PER_CALL and set(metrics.values()) == {1.0}
    print_note(line)
    if is_useless:
        print_note("no draft was right on held-out texts; train for more steps, or on more texts")
    for command in run.objective.decoding_commands(run.recipe, quote(str(folder))):
        print_note(f"  {command}")
