"""The result of `saltus train`: its folder, what was measured, and the commands that decode with it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any


def check_result_folder(folder: Path, recipe: Any) -> None:
    """Errors: ValueError for a folder with files of a model, or of a result of another kind of recipe."""
    from saltus.loading.metadata import ADAPTER_CONFIG_FILE, METADATA_FILE, read_metadata
    from saltus.methods.shared.published_files import CONFIG_FILE

    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; name a folder by --out")
    if (folder / METADATA_FILE).exists():
        earlier = None  # if it is damaged: the cure is to train again
        with suppress(ValueError):
            earlier = read_metadata(folder).training.get("recipe", {}).get("kind")
        is_other = earlier not in (None, recipe.kind)
    else:
        is_other = any((folder / name).exists() for name in (CONFIG_FILE, ADAPTER_CONFIG_FILE))
    if is_other:
        raise ValueError(f"{folder} holds something else, whose files would be replaced; name another folder by --out")


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
