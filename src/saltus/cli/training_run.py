"""Run a training from the command line: its texts, its progress, and what an interruption says."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from saltus.cli.training_log import TrainingLog, summary_writer
from saltus.cli.training_result import check_result_folder, print_result


def teacher_path(teacher: Path | None, work: Path, recipe: Any) -> Path:
    """The teacher's texts. Errors: ValueError with the command that writes them."""
    path = teacher or work / "teacher"
    if not path.exists():
        from saltus.training.objectives import OBJECTIVES

        temperatures = " ".join(f"--temperature {each:g}" for each in (0.0, *recipe.temperatures))
        template = f" --chat-template {recipe.chat_template}" if recipe.chat_template else ""
        cut = f" --top-k {recipe.top_k}" if recipe.top_k else ""
        cut += f" --top-p {recipe.top_p:g}" if recipe.top_p < 1 else ""
        raise ValueError(
            f"there is no teacher text in {path}; let the model write it first:"
            f" saltus collect {OBJECTIVES[recipe.kind].collect_command} --model {recipe.model}{template} --prompts FILE"
            f" {temperatures}{cut} --out {path}"
        )
    return path


def train_by_recipe(
    recipe: Any,
    name: str,
    texts: Sequence[Path],
    work: Path,
    begin: Path | None,
    out: Path | None,
    device: str,
    sharded: bool = False,
) -> None:
    """Read the texts, train each network of a recipe, and write the result to `out` (default: WORK/KIND)."""
    from saltus.training.run import open_run

    tensorboard = summary_writer()
    from saltus.cli.open_engine import open_engine
    from saltus.engine.checkpoints import resolve_device
    from saltus.evaluation.reports.environment import git_commit, machine_info
    from saltus.loading.load_model import silence_transformers
    from saltus.training.loop.checkpoint import lock_folder
    from saltus.training.loop.processes import join_processes

    folder, resolved = out or work / recipe.kind, resolve_device(device)
    check_result_folder(folder, recipe)
    on_cpu = resolved == "cpu"  # where the exact kernels read texts faster, too

    def load_engine(model: str) -> Any:
        where, exact = ("cpu", False) if sharded else (device, on_cpu)  # only a part of it may fit on a GPU
        return open_engine(model, "plain", None, dtype=recipe.dtype, device=where, exact=exact, weights="bf16")

    with silence_transformers(), join_processes(resolved) as processes:
        run = open_run(recipe, texts, work, begin, load_engine, processes, sharded, resolved)
        with lock_folder(work) if processes.is_main else nullcontext():
            processes.wait()  # until the folder is locked
            _collect_with_progress(run)
            trained = [(task, _train_with_progress(run, task, tensorboard)) for task in run.tasks()]
            for task, results in trained:
                run.save(task, folder, name, results, {"machine": machine_info(), "commit": git_commit()})
        if processes.is_main:
            print_result(folder, trained, run)


def _collect_with_progress(run: Any) -> None:
    from saltus.cli.progress import progress_meter

    live = run.processes.is_main
    try:
        with progress_meter(len(run.samples), "reading texts", live, in_logs=True) as show:
            for done in run.collect():
                show(done)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted; texts read so far are kept in {run.data_folder}, the same command goes on"
        ) from None


def _train_with_progress(run: Any, task: Any, tensorboard: Callable[..., Any]) -> dict[str, Any]:
    """Train, with a bar on a terminal, lines elsewhere, and curves for TensorBoard."""
    from saltus.cli.answers import print_note
    from saltus.cli.progress import progress_meter

    curves = TrainingLog(tensorboard, run.task_folder(task) / "tensorboard", task)
    steps, saved = run.schedule(task).steps, 0
    if not run.processes.is_main:
        return run.train(task, lambda progress: None, lambda step, loss: None)

    def on_step(step: int, loss: float) -> None:
        if step > 1 and curves.last_step == 0 and not sys.stderr.isatty():
            print_note(f"going on from step {step - 1:,}")
        curves.step(step, loss)
        show(step, curves.status_line)

    def on_checkpoint(progress: Any) -> None:
        nonlocal saved
        saved = progress.step
        curves.checkpoint(progress)
        if not sys.stderr.isatty():
            print_note(
                f"step {progress.step:,} of {steps:,}: {curves.status_line}, {progress.seconds_left / 60:.0f} min left"
            )

    try:
        with progress_meter(steps, task.phase or "training") as show:
            return run.train(task, on_checkpoint, on_step)
    except KeyboardInterrupt as stopped:
        if stopped.args:
            raise
        at = f" at step {curves.last_step:,}" if curves.last_step else ""
        last = "the last checkpoint" if run.checkpoint_path(task).exists() else "the beginning"
        onward = f"from {f'step {saved:,}' if saved else last}"
        raise KeyboardInterrupt(f"interrupted{at}; the same command goes on {onward}") from None
    finally:
        curves.close()
