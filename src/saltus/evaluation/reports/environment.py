"""Describe where a benchmark ran: the machine, versions, and the commit of the package."""

from __future__ import annotations

import inspect
import os
import platform
import subprocess
from collections.abc import Collection
from datetime import UTC, datetime
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
import transformers

import saltus
from saltus.engine.tuned_settings import memory_bytes
from saltus.evaluation.reports.command_line import command_line
from saltus.kernels.model_weights import describe_weights
from saltus.kernels.native.processor import processor_name
from saltus.methods import available_methods


def machine_info() -> dict[str, Any]:
    """Processor, cores that this process may use, threads that do, memory in GB (10⁹ bytes), GPU, and versions."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": processor_name(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "memory_gb": None if (memory := memory_bytes()) is None else round(memory / 1e9, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "saltus": saltus.__version__,
    }


def run_info(engine: Any, settings: dict[str, Any], methods: Collection[str] = ()) -> dict[str, Any]:
    """The facts that results must name: command, date, commit, packages of the methods, machine, model, settings."""
    model = engine.network.model
    return {
        "command": command_line(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "packages": method_packages(methods),
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


def method_packages(methods: Collection[str]) -> dict[str, str]:
    """By method: version and commit of the package that it comes from, of those that other packages have."""
    found = {}
    for entry in entry_points(group="saltus.methods"):
        if entry.name in methods and (method := available_methods().get(entry.name)) and entry.dist is not None:
            commit = git_commit(Path(inspect.getfile(method)))
            found[entry.name] = f"{entry.dist.name} {entry.dist.version}" + (f" at commit {commit}" if commit else "")
    return found


def git_commit(file: Path | None = None) -> str | None:
    """The commit of the repository that holds a file, or this package; with `+` if tracked files changed; or None."""
    file = file or Path(saltus.__file__)
    folder = file.parent
    try:
        if not _git(folder, "ls-files", file.name):  # a repository around a virtual environment is another one
            return None
        return _git(folder, "rev-parse", "--short", "HEAD") + (
            "+" if _git(folder, "diff", "HEAD", "--name-only") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *command: str) -> str:
    done = subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
