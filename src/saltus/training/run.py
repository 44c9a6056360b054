"""A recipe's training run: load models, cache what training needs of the texts, train, and save the result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from saltus.engine.checkpoints import require_same_vocabulary
from saltus.loading.model_identity import layers_digest, model_fingerprint, vocabulary_digest
from saltus.storage.cache_files import full_disk_errors
from saltus.storage.permissions import reset_permissions
from saltus.training.data.hidden_states import texts_digest
from saltus.training.data.teacher_texts import read_metadata
from saltus.training.loop import training_loop
from saltus.training.loop.checkpoint import load_checkpoint
from saltus.training.loop.processes import ONE_PROCESS, Processes
from saltus.training.loop.training_loop import Schedule, TrainingProgress
from saltus.training.objective import Objective, TrainingInputs
from saltus.training.objectives import OBJECTIVES
from saltus.training.settings import Recipe
from saltus.training.training_task import TrainingTask

OPTIONAL_RESULTS = "drafts_per_call", "acceptance_by_position", "accuracy_by_depth"


@dataclass(frozen=True, eq=False)
class TrainingRun(TrainingInputs):
    """A recipe with its inputs."""

    @property
    def objective(self) -> Objective:
        """The objective of the recipe's kind."""
        return OBJECTIVES[self.recipe.kind]

    @property
    def identity(self) -> dict[str, Any]:
        """The recipe's settings that can change the result, and mean something to its objective."""

        def used(settings: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in settings.items() if name not in self.objective.unused_keys}

        return used({**self.recipe.identity, "data": used(asdict(self.recipe.data))})

    @property
    def data_folder(self) -> Path:
        """What is cached of the teacher's texts."""
        return self.objective.cache_folder(self)

    def task_folder(self, task: TrainingTask) -> Path:
        """For the checkpoint and the curves of a task."""
        return self.work_folder / task.phase

    def checkpoint_path(self, task: TrainingTask) -> Path:
        """The file of a task's last checkpoint, which need not exist."""
        return self.task_folder(task) / "checkpoint.pt"

    def schedule(self, task: TrainingTask) -> Schedule:
        """A task's own schedule, else the recipe's."""
        return task.schedule or self.recipe.schedule

    def collect(self) -> Iterator[int]:
        """Cache what training needs of the texts; yields how many are done. Errors: ValueError."""
        if self.network is not None:
            size = self.network.model.get_input_embeddings().weight.shape[0]
            if max(max(*sample.prompt, *sample.completion) for sample in self.samples) >= size:
                raise ValueError(
                    f"the teacher's texts have tokens that {self.model_name} has not; let {self.model_name} write them"
                )
        return self.objective.collect(self)

    def make_task(self) -> TrainingTask:
        """The first task, before its first step. Errors: ValueError where the initial weights do not fit."""
        task = self.objective.make_task(self)
        task.processes = self.processes
        if self.initial_folder is not None:
            task.initialize_from(self.initial_folder)
        return task

    def tasks(self) -> Iterator[TrainingTask]:
        """The tasks, in the order of their training: each is made when the one before it is trained."""
        task: TrainingTask | None = self.make_task()
        while task is not None:
            task.processes = self.processes
            yield task
            task = self.objective.next_task(self, task)

    def train(
        self,
        task: TrainingTask,
        on_checkpoint: Callable[[TrainingProgress], None],
        on_step: Callable[[int, float], None],
    ) -> dict[str, Any]:
        """Train to the end, from the last checkpoint on; returns the results for the card. Errors: ValueError."""
        recipe = json.loads(json.dumps(self.identity))
        del recipe["schedule"]  # the loop compares it, without the steps between checkpoints
        settings = {"recipe": recipe}
        if self.network is not None:
            settings["target"] = model_fingerprint(self.network.model)
        settings["texts"] = task.dataset_digest() or texts_digest(self.samples)
        if self.initial_folder is not None:
            settings["begin"] = _weights_digest(self.initial_folder)
        training_loop.train(
            task.module, task.loss, self.schedule(task), self.checkpoint_path(task), settings, on_checkpoint,
            task.evaluate, on_step, task.processes, task.accuracy_by_depth,
        )  # fmt: skip
        state = load_checkpoint(self.checkpoint_path(task))
        assert state is not None
        evaluations = state["evaluations"]
        last = dict(evaluations[-1]) if evaluations else {}
        by_depth = last.pop("accuracy by depth", {})
        metrics = {name: round(value, 3) for name, value in last.items() if name != "step" and value == value}
        minutes = round(state["seconds"] / 60, 1)
        by_depth = {name: [round(share, 3) for share in shares] for name, shares in by_depth.items()}
        by_position = {
            name: [round(share, 3) for share in shares] for name, shares in task.acceptance_by_position().items()
        }
        results = {"loss": metrics.pop("loss", None), "metrics": metrics, "minutes": minutes}
        optional = dict(zip(OPTIONAL_RESULTS, (task.drafts_per_call, by_position, by_depth), strict=True))
        return results | {name: found for name, found in optional.items() if found}

    def save(
        self, task: TrainingTask, folder: Path, name: str, results: Mapping[str, Any], environment: Mapping[str, Any]
    ) -> None:
        """Let the main process write the result of `train`, with a card that describes how it was made."""
        if not self.processes.is_main:
            self.processes.wait()
            return
        card = self._card(task, name, results, environment)
        with full_disk_errors(folder):
            task.save(folder, card)
            reset_permissions(folder)
        self.processes.wait()

    def _card(
        self, task: TrainingTask, name: str, results: Mapping[str, Any], environment: Mapping[str, Any]
    ) -> dict[str, Any]:
        measured = {task.metrics_name.replace("-", "_").replace(" ", "_"): results["metrics"]}
        return {
            "recipe": {"name": name, **self.identity},
            **({} if self.initial_folder is None else {"begun_with": str(self.initial_folder)}),
            **self.objective.describe_texts(self.recipe, self.samples),
            "steps": self.schedule(task).steps,
            "seed": self.recipe.data.seed,
            "loss": results["loss"],
            **measured,
            **{key: results[key] for key in OPTIONAL_RESULTS if key in results},
            "minutes": results["minutes"],
            **environment,
        }


def open_run(
    recipe: Recipe,
    paths: Sequence[Path],
    work_folder: Path,
    initial_folder: Path | None,
    load_engine: Callable[[str], Any],
    processes: Processes = ONE_PROCESS,
    sharded: bool = False,
    device: str = "cpu",
) -> TrainingRun:
    """Read the texts of these paths, load the models of a run, and perhaps distribute them over its processes.

    Errors: ValueError if another model wrote the texts, or for another vocabulary, or if initial weights do not fit.
    """
    objective = OBJECTIVES[recipe.kind]
    initial_folder = None if initial_folder is None else objective.resolve_initial(initial_folder)
    samples = objective.select_texts(recipe, paths)
    if not objective.needs_target:
        return TrainingRun(
            recipe, samples, None, "", work_folder, processes=processes, initial_folder=initial_folder, device=device
        )
    engine = load_engine(recipe.model)
    for path in paths:
        check_teacher_model(path, engine.network.model, engine.tokenizer, recipe.model)
    student = None
    if student_name := objective.student_name(recipe):
        student_engine = load_engine(student_name)
        require_same_vocabulary(engine.target, student_engine.target)
        student = student_engine.network.model
    if sharded:
        for model in (engine.network.model, *([] if student is None else [student])):
            processes.shard(model)
    run = TrainingRun(
        recipe, samples, engine.network, recipe.model, work_folder, student, engine.tokenizer, processes, sharded,
        initial_folder, device,
    )  # fmt: skip
    if initial_folder is not None:
        objective.check_initial(run, initial_folder)
    return run


def _weights_digest(folder: Path) -> str:
    """A digest of a folder's weights."""
    digest = blake2b(digest_size=16)
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


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
    layers = metadata.get("layers"), layers_digest(model)
    is_other = all(layers) and layers[0] != layers[1]
    if metadata and (is_other or metadata["fingerprint"] != model_fingerprint(model)):
        made, cure = "written by", f"let {name} write its own"
        if metadata.get("given"):
            made, cure = "tokenized for", f"give --model {name} to saltus collect data"
        raise ValueError(f"the texts in {teacher} were {made} {metadata['model']}, not {name}; {cure}")
