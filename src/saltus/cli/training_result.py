"""The result of `saltus train`: its folder, what was measured, and the commands that decode with it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import Any

from saltus.storage.cache_files import TEMPORARY

WRITTEN_SUFFIXES = {".json", ".safetensors", ".md", ".jinja", ".model"}  # of files in the folder of a result


def check_result_folder(folder: Path, recipe: Any) -> None:
    """Errors: ValueError for a folder that cannot be written, or with files of a model, or of a result of another kind.

    One recipe's `trains=model` and `trains=adapter` are two kinds: the files of one do not replace those of the other.
    """
    from saltus.loading.metadata import ADAPTER_CONFIG_FILE, METADATA_FILE, read_metadata
    from saltus.methods.shared.published_files import CONFIG_FILE

    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not existing.is_dir():
        raise ValueError(f"{existing} is a file; name a folder by --out")
    try:
        with TemporaryDirectory(dir=existing, prefix=TEMPORARY):
            pass
    except OSError as error:
        raise ValueError(
            f"nothing can be written in {existing} ({error.strerror}); make it writable, or name another by --out"
        ) from None
    for file in sorted(folder.glob("*")):
        if file.suffix in WRITTEN_SUFFIXES and file.is_file() and not os.access(file, os.W_OK):
            raise ValueError(f"{file} cannot be replaced; make it writable, or name another folder by --out")
    if (folder / METADATA_FILE).exists():
        is_other = False  # if it is damaged: the cure is to train again
        with suppress(ValueError):
            earlier = read_metadata(folder)
            kind = earlier.training.get("recipe", {}).get("kind")
            is_other = (
                kind not in (None, recipe.kind) or getattr(recipe.settings, "trains", earlier.kind) != earlier.kind
            )
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
            drafts = results.get("drafts_per_call", 0)
            counted = f", of {drafts} draft{'s' * (drafts > 1)} at most" if drafts else ""
            line += f"; {task.metrics_name}{counted}: " + ", ".join(
                f"{name} {value:.2f}" for name, value in metrics.items()
            )
        is_useless |= task.metrics_name == TOKENS_PER_CALL and set(metrics.values()) == {1.0}
    print_note(line)
    for _, results in trained:
        for name, shares in results.get("acceptance_by_position", {}).items():
            if shares:
                print_note(f"held-out acceptance by position, {name}: " + ", ".join(f"{share:.2f}" for share in shares))
    if is_useless:
        print_note("no draft was right on held-out texts; train for more steps, or on more texts")
    for command in run.objective.decoding_commands(run.recipe, quote(str(folder))):
        print_note(f"  {command}")
