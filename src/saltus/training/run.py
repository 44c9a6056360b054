"""Carry out a recipe: read the teacher's texts once, train on what was kept, and save what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from saltus.networks.loading.drafter_files import model_fingerprint
from saltus.training.data.hidden_states import Sample, collect_hidden_states, load_hidden_states
from saltus.training.data.teacher_texts import read_metadata, read_teacher_texts
from saltus.training.data.text_intervals import collect_uniform_intervals, load_uniform_intervals
from saltus.training.data.trajectories import Trajectory, read_trajectories, trajectories_digest
from saltus.training.loop import training_loop
from saltus.training.loop.checkpoint import load_checkpoint
from saltus.training.recipe import Recipe
from saltus.training.tasks.adapter import AdapterTrainingTask
from saltus.training.tasks.drafter import DrafterTrainingTask
from saltus.training.tasks.heads import HeadsTrainingTask
from saltus.training.tasks.jacobi_forcing import JacobiTrainingTask
from saltus.training.tasks.training_task import TrainingTask

MIN_COMPLETION_TOKENS = 9  # tokens of a completion that something can be learned from


@dataclass(frozen=True, eq=False)
class TrainingRun:
    """A recipe for a model, and where its states and checkpoint are kept."""

    recipe: Recipe
    network: Any  # a CausalNetwork
    model_name: str  # of the model
    work_folder: Path
    initial_folder: Path | None = None  # a folder of what was trained before, to go on with
    student: Any = None  # the model that `recipe.adapter.student` names
    tokenizer: Any = None  # that a trained model is saved with

    @property
    def data_folder(self) -> Path:
        """What was read from the teacher's texts."""
        return self.work_folder / ("edges" if self.recipe.kind == "adapter" else "states")

    @property
    def checkpoint_path(self) -> Path:
        return self.work_folder / "checkpoint.pt"

    def collect(self, samples: Sequence[Sample]) -> Iterator[int]:
        """Keep what is learned from; yields how many texts are read. Errors: ValueError."""
        recipe, model = self.recipe, self.network.model
        size = model.get_input_embeddings().weight.shape[0]
        if max(max(*sample.prompt, *sample.completion) for sample in samples) >= size:
            raise ValueError(
                f"the teacher's texts have tokens that {self.model_name} has not; let {self.model_name} write them"
            )
        if recipe.kind == "forcing":  # the texts are all
            return iter((len(samples),))
        if recipe.kind == "adapter":
            return collect_uniform_intervals(
                model, samples, self.data_folder, recipe.temperatures, recipe.lessons.slots
            )
        shaped = recipe.drafter if recipe.kind == "drafter" else recipe.heads
        self.network.add_hidden_state_layers(shaped.shape(model).taps)
        return collect_hidden_states(self.network, samples, self.data_folder, recipe.temperatures)

    def make_task(self, samples: Sequence[Sample]) -> TrainingTask:
        """What is trained, at its beginning. Errors: ValueError where `begin` does not fit."""
        recipe, model = self.recipe, self.network.model
        course: TrainingTask
        if recipe.kind == "drafter":
            shape, size = recipe.drafter.shape(model), recipe.drafter.vocabulary
            course = DrafterTrainingTask(
                model, load_hidden_states(self.data_folder), shape, size, recipe.lessons, self.model_name
            )
        elif recipe.kind == "heads":
            shape, size = recipe.heads.shape(model), recipe.heads.vocabulary
            course = HeadsTrainingTask(
                model, load_hidden_states(self.data_folder), shape, size, recipe.lessons, self.model_name
            )
        elif recipe.kind == "forcing":
            forcing, texts = recipe.forcing, [one for one in samples if isinstance(one, Trajectory)]
            course = JacobiTrainingTask(
                model, texts, forcing.gating, forcing.noise, forcing.loss, forcing.text_weight, forcing.anchor,
                recipe.lessons, self.model_name, forcing.recompute, forcing.autocast, self.tokenizer,
            )  # fmt: skip
        else:
            own, lessons = recipe.adapter, recipe.lessons
            mine, name, teacher = model, self.model_name, None
            if self.student is not None:
                mine, name, teacher = self.student, own.student, model
            course = AdapterTrainingTask(
                mine, load_uniform_intervals(self.data_folder), own.gating, own.objective(lessons.placement), lessons,
                name, own.recompute, own.autocast, teacher, self.model_name,
            )  # fmt: skip
        if self.initial_folder is not None:
            course.initialize_from(self.initial_folder)
        return course

    def queries_per_step(self, task: TrainingTask) -> int:
        """Rows of a step that learn, about."""
        lessons, kind = self.recipe.lessons, self.recipe.kind
        if isinstance(task, JacobiTrainingTask):
            return (
                lessons.texts
                * sum(len(one.completion) for one in task.training_trajectories)
                // len(task.training_trajectories)
            )
        return lessons.texts * lessons.windows * getattr(self.recipe, kind).window

    def train(
        self,
        task: TrainingTask,
        on_checkpoint: Callable[[training_loop.Progress], None],
        on_step: Callable[[int, float], None],
    ) -> dict[str, Any]:
        """Train to the end, from the last checkpoint on; what a card tells of it. Errors: ValueError."""
        conditioning = json.loads(json.dumps(self.recipe.settings))
        del conditioning["schedule"]  # the loop's own setting, of which it leaves out how often it is saved
        settings = {"recipe": conditioning, "target": model_fingerprint(self.network.model)}
        if isinstance(task, JacobiTrainingTask):
            settings["texts"] = trajectories_digest(task.trajectories)
        if self.initial_folder is not None:
            settings["begin"] = _weights_digest(self.initial_folder)
        schedule, path = self.recipe.schedule, self.checkpoint_path
        training_loop.train(task.module, task.loss, schedule, path, settings, on_checkpoint, task.evaluate, on_step)
        state = load_checkpoint(path)
        assert state is not None
        last = state["exams"][-1] if state["exams"] else {}
        found = {name: round(value, 3) for name, value in last.items() if name != "step" and value == value}
        minutes = round(state["seconds"] / 60, 1)
        return {"loss": found.pop("loss", None), "held_out_tokens_per_call": found, "minutes": minutes}


def _weights_digest(folder: Path) -> str:
    """What tells a folder's weights from others."""
    digest = blake2b(digest_size=16)
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def select_teacher_texts(recipe: Recipe, teacher: Path) -> Sequence[Sample]:
    """Those that are long enough, as many as the recipe takes, evenly spread. Errors: ValueError."""
    texts = read_trajectories(teacher) if recipe.kind == "forcing" else read_teacher_texts(teacher)
    found = [sample for sample in texts if len(sample.completion) >= MIN_COMPLETION_TOKENS]
    if len(found) < 2:
        raise ValueError(
            f"{teacher} holds fewer than two texts of {MIN_COMPLETION_TOKENS} tokens or more; collect more"
        )
    count = min(recipe.teacher_texts or len(found), len(found))
    return [found[number * len(found) // count] for number in range(count)]


def check_teacher_model(teacher: Path, model: Any, name: str) -> None:
    """Errors: ValueError where a folder says that another model wrote it."""
    papers: Mapping[str, Any] = read_metadata(teacher) if teacher.is_dir() else {}
    if papers and papers["fingerprint"] != model_fingerprint(model):
        raise ValueError(
            f"the texts in {teacher} were written by {papers['model']}, not by {name}; let {name} write its own"
        )
