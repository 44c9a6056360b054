"""A training loop that can be killed at any moment and resumes from its last checkpoint with an identical outcome.

It is our own, since trainers such as that of Transformers bring their own data order, random state and checkpoints.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from saltus.training.loop.checkpoint import load_checkpoint, save_checkpoint, write_atomically
from saltus.training.loop.muon import Muon
from saltus.training.loop.processes import ONE_PROCESS, Processes

EVALUATIONS_FILE = "evaluations.jsonl"


@dataclass(frozen=True)
class Schedule:
    """Steps and learning rate: a linear warm-up, then a cosine down to a tenth of it. Fields are keys of recipes.

    The optimizer `muon` trains the weights in the module's attribute `matrices`; AdamW trains all others.
    """

    steps: int
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    max_grad_norm: float = 1.0
    checkpoint_steps: int = 200  # steps between checkpoints
    weight_decay: float = 0.01
    optimizer: Literal["adamw", "muon"] = "adamw"
    muon_bfloat16: bool = False  # Muon computes in bfloat16, for processors that do so natively

    def __post_init__(self) -> None:
        if self.steps < 1 or self.checkpoint_steps < 1:
            raise ValueError(
                f"steps is {self.steps} and checkpoint_steps is {self.checkpoint_steps}, but both count from 1"
            )

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of a step."""
        warm = min(1.0, (step + 1) / max(1, min(self.warmup_steps, self.steps // 10)))
        return self.learning_rate * warm * (0.55 + 0.45 * math.cos(math.pi * step / self.steps))


@dataclass(frozen=True)
class TrainingProgress:
    """The state of a run at a checkpoint. Times in seconds; the loss is the mean since the last checkpoint."""

    step: int
    steps: int
    loss: float
    seconds: float  # of training, including those before an interruption
    seconds_left: float
    metrics: dict[str, float] = field(default_factory=dict)  # of the evaluation
    accuracy_by_depth: dict[str, list[float]] = field(default_factory=dict)  # as of `TrainingTask`


def train(
    module: nn.Module,
    loss: Callable[[int], Tensor],
    schedule: Schedule,
    checkpoint_path: Path,
    settings: dict[str, Any],
    on_checkpoint: Callable[[TrainingProgress], None] = lambda progress: None,
    evaluate: Callable[[], dict[str, float]] = dict,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
    processes: Processes = ONE_PROCESS,
    accuracy_by_depth: Callable[[], dict[str, list[float]]] = dict,
) -> list[float]:
    """Train in place; returns the mean losses between checkpoints.

    `loss(step)` must depend on the step and the weights alone. A checkpoint holds the result of `evaluate`, with step
    and loss, under "evaluations"; they also stand beside it in evaluations.jsonl. `on_step(step, loss)` counts from 1.
    `settings` identify the run. With processes `loss` is a process's part, whose average over them is the step's loss;
    all have the same weights after each step, and a checkpoint, which the main one writes, is the same for any number
    of them. At Ctrl-C the step is ended and saved before KeyboardInterrupt is raised. Errors: ValueError for a
    checkpoint of another run at this path, for a damaged one, and for a loss that is not finite.
    """
    optimizers = make_optimizers(module, schedule)
    settings = settings | {
        "schedule": {key: value for key, value in asdict(schedule).items() if key != "checkpoint_steps"}
    }
    state = _resumed(checkpoint_path, settings, module, optimizers)
    if float(processes.average(torch.tensor(float(state.step)))) != state.step:
        raise ValueError(f"only some processes find {checkpoint_path}; all machines must share its disk")
    began = time.perf_counter() - state.seconds
    module.train()
    synchronized_loss = processes.synchronized(module, loss)

    def save() -> None:
        state.seconds = time.perf_counter() - began
        parts = {"module": module.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
        if processes.is_main:
            save_checkpoint(checkpoint_path, parts | {"settings": settings} | vars(state))
            lines = "".join(
                json.dumps({name: value for name, value in evaluation.items() if value == value}) + "\n"
                for evaluation in state.evaluations
            )
            write_atomically(checkpoint_path.with_name(EVALUATIONS_FILE), lambda file: file.write(lines.encode()))
        processes.wait()

    with processes.postponed_interrupt() as is_interrupted:
        while state.step < schedule.steps:
            part = synchronized_loss(state.step)
            optimizer_step(module, optimizers, part, schedule.learning_rate_at(state.step), schedule.max_grad_norm)
            step_loss = float(processes.average(part))
            state.total += step_loss
            state.step += 1
            on_step(state.step, step_loss)
            if state.step % schedule.checkpoint_steps == 0 or state.step == schedule.steps:
                mean = state.total / (state.step - state.first)
                if not math.isfinite(mean):
                    raise ValueError(
                        f"the loss is {mean} at step {state.step}; take a lower rate than {schedule.learning_rate}"
                    )
                metrics, by_depth = evaluate(), accuracy_by_depth()
                state.curve.append(mean)
                state.evaluations.append({"step": state.step, "loss": mean, **metrics})
                if by_depth:
                    state.evaluations[-1]["accuracy by depth"] = by_depth
                state.first, state.total = state.step, 0.0
                save()
                left = state.seconds / state.step * (schedule.steps - state.step)
                done = TrainingProgress(state.step, schedule.steps, mean, state.seconds, left, metrics, by_depth)
                on_checkpoint(done)
            if is_interrupted():
                if not math.isfinite(state.total):
                    raise KeyboardInterrupt
                if state.first < state.step:
                    save()
                at = f"at step {state.step:,}, which is saved"
                raise KeyboardInterrupt(f"interrupted {at}; the same command goes on from there")
    module.eval()
    return state.curve


@dataclass
class _RunState:
    """What a checkpoint holds besides the weights, the optimizers' state and the settings."""

    step: int = 0
    seconds: float = 0.0  # of training
    first: int = 0  # the step from which on losses are summed
    total: float = 0.0  # their sum
    curve: list[float] = field(default_factory=list)  # mean losses between checkpoints
    evaluations: list[dict[str, Any]] = field(default_factory=list)


def _resumed(path: Path, settings: Mapping[str, Any], module: nn.Module, optimizers: Sequence[Any]) -> _RunState:
    """The state of the run whose checkpoint this is, or of a new one. Errors: ValueError for another run's."""
    saved = load_checkpoint(path)
    if saved is None:
        return _RunState()
    if saved["settings"] != settings:
        raise ValueError(
            f"{path} belongs to a run with other settings ({_differing(saved['settings'], settings)});"
            " take another --work, or delete it; --from goes on from a run's result"
        )
    module.load_state_dict(saved["module"])
    for optimizer, optimizer_state in zip(optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(optimizer_state)
    known = {each.name: saved[each.name] for each in fields(_RunState) if each.name in saved}
    return _RunState(**{"first": saved["step"]} | known)  # older files have neither a first step nor a total


def print_progress(progress: TrainingProgress) -> None:
    """An `on_checkpoint` that prints a line to stderr; metrics without texts, which are NaN, are left out."""
    metrics = "".join(f", {name} {value:.2f}" for name, value in progress.metrics.items() if value == value)
    print(
        f"step {progress.step:,} of {progress.steps:,}: loss {progress.loss:.3f}{metrics};"
        f" {progress.seconds / 60:.1f} min, {progress.seconds_left / 60:.1f} left",
        file=sys.stderr, flush=True,
    )  # fmt: skip


def make_optimizers(module: nn.Module, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """The optimizers of a module's weights, as the schedule names them."""
    matrices = list(getattr(module, "matrices", ())) if schedule.optimizer == "muon" else []
    chosen = {id(weight) for weight in matrices}
    rest = [weight for weight in module.parameters() if id(weight) not in chosen]
    rate, decay = schedule.learning_rate, schedule.weight_decay
    optimizers: list[torch.optim.Optimizer] = []
    if rest:
        optimizers += [torch.optim.AdamW(rest, lr=rate, weight_decay=decay, betas=(0.9, 0.99), fused=True)]
    if matrices:
        optimizers += [Muon(matrices, lr=rate, weight_decay=decay, use_bfloat16=schedule.muon_bfloat16)]
    return optimizers


def optimizer_step(
    module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], loss: Tensor, rate: float, clip: float
) -> None:
    """Change the weights by the gradients of a loss."""
    module.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(module.parameters(), clip)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The names of settings that differ, by their paths."""
    names = []
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            names += [f"{name}.{inner}" for inner in sorted({*old, *new}) if old.get(inner) != new.get(inner)]
        elif old != new:
            names.append(name)
    return ", ".join(names)
