"""Describe where a benchmark ran: the machine, versions, and the commit of the package."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

import saltus
from saltus.engine.tuned_settings import memory_bytes
from saltus.evaluation.reports.command_line import command_line
from saltus.kernels.native.processor import processor_name
from saltus.kernels.packed_weight import describe_weights


def machine_info() -> dict[str, Any]:
    """Processor, cores that this process may use, memory in GB (10⁹ bytes), GPU or None, system, and versions."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": processor_name(),
        "cores": cores,
        "memory_gb": None if (memory := memory_bytes()) is None else round(memory / 1e9, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "saltus": saltus.__version__,
    }


def run_info(engine: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """The facts that results must name: command, date, commit, machine, model and settings."""
    model = engine.network.model
    return {
        "command": command_line(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "machine": machine_info(),
        "model": {
            "name": engine.target.name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "weights": describe_weights(model),
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "context": engine.target.context_length,
            "path": engine.network.compute_path,
        },
        "settings": settings,
    }


def git_commit() -> str | None:
    """The commit of the repository that holds the package, with `+` if tracked files were changed; or None."""
    folder = Path(saltus.__file__).parent
    try:
        if not _git(folder, "ls-files", "__init__.py"):  # a repository around a virtual environment is another one
            return None
        return _git(folder, "rev-parse", "--short", "HEAD") + (
            "+" if _git(folder, "diff", "HEAD", "--name-only") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *command: str) -> str:
    done = subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
