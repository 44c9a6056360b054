"""A recipe's training run: select texts, load models, cache what training needs, train, and save the result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from saltus.engine.checkpoints import require_same_vocabulary
from saltus.loading.model_identity import model_fingerprint, vocabulary_digest
from saltus.training.data.hidden_states import Sample
from saltus.training.data.teacher_texts import read_metadata
from saltus.training.loop import training_loop
from saltus.training.loop.checkpoint import load_checkpoint
from saltus.training.loop.processes import ONE_PROCESS, Processes
from saltus.training.loop.training_loop import Schedule, TrainingProgress
from saltus.training.objective import TrainingInputs
from saltus.training.objectives import OBJECTIVES
from saltus.training.settings import Recipe
from saltus.training.training_task import TrainingTask

MIN_COMPLETION_TOKENS = 9  # of a text that is used


@dataclass(frozen=True, eq=False)
class TrainingRun(TrainingInputs):
    """A recipe with its inputs, and where it starts."""

    initial_folder: Path | None = None  # an earlier result, whose weights it starts with

    @property
    def checkpoint_path(self) -> Path:
        return self.work_folder / "checkpoint.pt"

    def collect(self) -> Iterator[int]:
        """Cache what training needs of the texts; yields how many are done. Errors: ValueError."""
        size = self.network.model.get_input_embeddings().weight.shape[0]
        if max(max(*sample.prompt, *sample.completion) for sample in self.samples) >= size:
            raise ValueError(
                f"the teacher's texts have tokens that {self.model_name} has not; let {self.model_name} write them"
            )
        return OBJECTIVES[self.recipe.kind].collect(self)

    def make_task(self) -> TrainingTask:
        """The task, before its first step. Errors: ValueError where the initial weights do not fit."""
        task = OBJECTIVES[self.recipe.kind].make_task(self)
        task.processes = self.processes
        if self.initial_folder is not None:
            task.initialize_from(self.initial_folder)
        return task

    def train(
        self,
        task: TrainingTask,
        on_checkpoint: Callable[[TrainingProgress], None],
        on_step: Callable[[int, float], None],
    ) -> dict[str, Any]:
        """Train to the end, from the last checkpoint on; returns the results for the card. Errors: ValueError."""
        recipe = json.loads(json.dumps(self.recipe.identity))
        del recipe["schedule"]  # the loop compares it, without the steps between checkpoints
        settings = {"recipe": recipe, "target": model_fingerprint(self.network.model)}
        if digest := task.dataset_digest():
            settings["texts"] = digest
        if self.initial_folder is not None:
            settings["begin"] = _weights_digest(self.initial_folder)
        train_task(task, self.recipe.schedule, self.checkpoint_path, settings, on_checkpoint, on_step)
        state = load_checkpoint(self.checkpoint_path)
        assert state is not None
        evaluations = state["evaluations"]
        last = evaluations[-1] if evaluations else {}
        metrics = {name: round(value, 3) for name, value in last.items() if name != "step" and value == value}
        minutes = round(state["seconds"] / 60, 1)
        return {"loss": metrics.pop("loss", None), "held_out_tokens_per_call": metrics, "minutes": minutes}

    def save(
        self, task: TrainingTask, folder: Path, name: str, results: Mapping[str, Any], environment: Mapping[str, Any]
    ) -> None:
        """Let the main process write the result, with a card that describes how it was made."""
        if not self.processes.is_main:
            self.processes.wait()
            return
        task.save(
            folder,
            {
                "recipe": {"name": name, **self.recipe.identity},
                "coupling": OBJECTIVES[self.recipe.kind].coupling(self.recipe, self.samples),
                **({} if self.initial_folder is None else {"begun_with": str(self.initial_folder)}),
                "teacher_texts": len(self.samples),
                "teacher_tokens": sum(len(sample.prompt) + len(sample.completion) for sample in self.samples),
                "steps": self.recipe.schedule.steps,
                "seed": self.recipe.data.seed,
                **results,
                **environment,
            },
        )
        self.processes.wait()


def train_task(
    task: TrainingTask,
    schedule: Schedule,
    checkpoint_path: Path,
    settings: dict[str, Any],
    on_checkpoint: Callable[[TrainingProgress], None],
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """Run the training loop on a task; returns the mean losses between checkpoints."""
    return training_loop.train(
        task.module, task.loss, schedule, checkpoint_path, settings, on_checkpoint, task.evaluate, on_step,
        task.processes,
    )  # fmt: skip


def open_run(
    recipe: Recipe,
    samples: Sequence[Sample],
    teachers: Sequence[Path],
    work_folder: Path,
    initial_folder: Path | None,
    load_engine: Callable[[str], Any],
    processes: Processes = ONE_PROCESS,
    sharded: bool = False,
) -> TrainingRun:
    """Load the models of a run, and perhaps distribute them over its processes.

    Errors: ValueError if another model wrote the texts, or for another vocabulary, or if initial weights do not fit.
    """
    engine = load_engine(recipe.model)
    for teacher in teachers:
        check_teacher_model(teacher, engine.network.model, engine.tokenizer, recipe.model)
    student = None
    if student_name := OBJECTIVES[recipe.kind].student_name(recipe):
        student_engine = load_engine(student_name)
        require_same_vocabulary(engine.target, student_engine.target)
        student = student_engine.network.model
    if sharded:
        for model in (engine.network.model, *([] if student is None else [student])):
            processes.shard(model)
    run = TrainingRun(
        recipe, samples, engine.network, recipe.model, work_folder, student, engine.tokenizer, processes, sharded,
        initial_folder,
    )  # fmt: skip
    if initial_folder is not None:
        OBJECTIVES[recipe.kind].check_initial(run, initial_folder)
    return run


def _weights_digest(folder: Path) -> str:
    """A digest of a folder's weights."""
    digest = blake2b(digest_size=16)
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def select_teacher_texts(recipe: Recipe, *teachers: Path) -> Sequence[Sample]:
    """Texts that are long enough, as many as the recipe takes, evenly spread over all. Errors: ValueError."""
    texts = [text for teacher in teachers for text in OBJECTIVES[recipe.kind].read_texts(teacher)]
    long_enough = [sample for sample in texts if len(sample.completion) >= MIN_COMPLETION_TOKENS]
    if len(long_enough) < 2:
        named = " and ".join(map(str, teachers))
        raise ValueError(f"{named} holds fewer than two texts of {MIN_COMPLETION_TOKENS} tokens or more; collect more")
    count = min(recipe.teacher_texts or len(long_enough), len(long_enough))
    return [long_enough[number * len(long_enough) // count] for number in range(count)]


def check_teacher_model(teacher: Path, model: Any, tokenizer: Any, name: str) -> None:
    """Errors: ValueError where the metadata of a folder names another model, or a server with other tokens."""
    metadata: Mapping[str, Any] = read_metadata(teacher) if teacher.is_dir() else {}
    if "served" in metadata:
        if metadata["vocabulary"] != vocabulary_digest(tokenizer):
            raise ValueError(
                f"the texts in {teacher} were tokenized for {metadata['model']}, whose tokens are others than those of"
                f" {name}; give --model {name} to saltus collect text"
            )
        return
    if metadata and metadata["fingerprint"] != model_fingerprint(model):
        made, cure = "written by", f"let {name} write its own"
        if metadata.get("given"):
            made, cure = "tokenized for", f"give --model {name} to saltus collect data"
        raise ValueError(f"the texts in {teacher} were {made} {metadata['model']}, not {name}; {cure}")
