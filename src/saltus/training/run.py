"""Carry out a recipe: read the teacher's texts once, train on what was kept, and save what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from saltus.networks.trained_files import fingerprint
from saltus.training import loop
from saltus.training.adapter import AdapterCourse
from saltus.training.checkpoint import load
from saltus.training.course import Course
from saltus.training.drafter import DrafterCourse
from saltus.training.heads import HeadsCourse
from saltus.training.jacobi import JacobiCourse
from saltus.training.recipe import Recipe
from saltus.training.states import Sample, collect, load_states
from saltus.training.teacher import read_papers, read_teacher
from saltus.training.texts import collect_edges, load_edges
from saltus.training.trajectories import Trajectory, read_trajectories, texts_digest

SHORTEST = 9  # tokens of a completion that something can be learned from


@dataclass(frozen=True, eq=False)
class Run:
    """A recipe for a model, and where its states and checkpoint are kept."""

    recipe: Recipe
    network: Any  # a CausalNetwork
    name: str  # of the model
    work: Path
    begin: Path | None = None  # a folder of what was trained before, to go on with
    student: Any = None  # the model that `recipe.adapter.student` names
    tokenizer: Any = None  # that a trained model is saved with

    @property
    def kept(self) -> Path:
        """What was read from the teacher's texts."""
        return self.work / ("edges" if self.recipe.kind == "adapter" else "states")

    @property
    def checkpoint(self) -> Path:
        return self.work / "checkpoint.pt"

    def read(self, samples: Sequence[Sample]) -> Iterator[int]:
        """Keep what is learned from; yields how many texts are read. Errors: ValueError."""
        recipe, model = self.recipe, self.network.model
        size = model.get_input_embeddings().weight.shape[0]
        if max(max(*sample.prompt, *sample.completion) for sample in samples) >= size:
            raise ValueError(f"the teacher's texts have tokens that {self.name} has not; let {self.name} write them")
        if recipe.kind == "forcing":  # the texts are all
            return iter((len(samples),))
        if recipe.kind == "adapter":
            return collect_edges(model, samples, self.kept, recipe.temperatures, recipe.lessons.slots)
        shaped = recipe.drafter if recipe.kind == "drafter" else recipe.heads
        self.network.tap(shaped.shape(model).taps)
        return collect(self.network, samples, self.kept, recipe.temperatures)

    def course(self, samples: Sequence[Sample]) -> Course:
        """What is trained, at its beginning. Errors: ValueError where `begin` does not fit."""
        recipe, model = self.recipe, self.network.model
        course: Course
        if recipe.kind == "drafter":
            shape, size = recipe.drafter.shape(model), recipe.drafter.vocabulary
            course = DrafterCourse(model, load_states(self.kept), shape, size, recipe.lessons, self.name)
        elif recipe.kind == "heads":
            shape, size = recipe.heads.shape(model), recipe.heads.vocabulary
            course = HeadsCourse(model, load_states(self.kept), shape, size, recipe.lessons, self.name)
        elif recipe.kind == "forcing":
            forcing, texts = recipe.forcing, [one for one in samples if isinstance(one, Trajectory)]
            course = JacobiCourse(
                model, texts, forcing.gating, forcing.noise, forcing.loss, forcing.text_weight, forcing.anchor,
                recipe.lessons, self.name, forcing.recompute, forcing.autocast, self.tokenizer,
            )  # fmt: skip
        else:
            own, lessons = recipe.adapter, recipe.lessons
            mine, name, teacher = model, self.name, None
            if self.student is not None:
                mine, name, teacher = self.student, own.student, model
            course = AdapterCourse(
                mine, load_edges(self.kept), own.gating, own.objective(lessons.placement), lessons, name,
                own.recompute, own.autocast, teacher, self.name,
            )  # fmt: skip
        if self.begin is not None:
            course.begin(self.begin)
        return course

    def queries(self, course: Course) -> int:
        """Rows of a step that learn, about."""
        lessons, kind = self.recipe.lessons, self.recipe.kind
        if isinstance(course, JacobiCourse):
            return lessons.texts * sum(len(one.completion) for one in course.own) // len(course.own)
        return lessons.texts * lessons.windows * getattr(self.recipe, kind).window

    def train(
        self, course: Course, report: Callable[[loop.Progress], None], watch: Callable[[int, float], None]
    ) -> dict[str, Any]:
        """Train to the end, from the last checkpoint on; what a card tells of it. Errors: ValueError."""
        told = json.loads(json.dumps(self.recipe.settings))
        del told["schedule"]  # the loop's own setting, of which it leaves out how often it is saved
        settings = {"recipe": told, "target": fingerprint(self.network.model)}
        if isinstance(course, JacobiCourse):
            settings["texts"] = texts_digest(course.trajectories)
        if self.begin is not None:
            settings["begin"] = _digest(self.begin)
        schedule, path = self.recipe.schedule, self.checkpoint
        loop.train(course.module, course.loss, schedule, path, settings, report, course.report, watch)
        state = load(path)
        assert state is not None
        last = state["exams"][-1] if state["exams"] else {}
        found = {name: round(value, 3) for name, value in last.items() if name != "step" and value == value}
        minutes = round(state["seconds"] / 60, 1)
        return {"loss": found.pop("loss", None), "held_out_tokens_per_call": found, "minutes": minutes}


def _digest(folder: Path) -> str:
    """What tells a folder's weights from others."""
    digest = blake2b(digest_size=16)
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def teacher_texts(recipe: Recipe, teacher: Path) -> Sequence[Sample]:
    """Those that are long enough, as many as the recipe takes, evenly spread. Errors: ValueError."""
    texts = read_trajectories(teacher) if recipe.kind == "forcing" else read_teacher(teacher)
    found = [sample for sample in texts if len(sample.completion) >= SHORTEST]
    if len(found) < 2:
        raise ValueError(f"{teacher} holds fewer than two texts of {SHORTEST} tokens or more; collect more")
    count = min(recipe.teacher_texts or len(found), len(found))
    return [found[number * len(found) // count] for number in range(count)]


def written_by(teacher: Path, model: Any, name: str) -> None:
    """Errors: ValueError where a folder says that another model wrote it."""
    papers: Mapping[str, Any] = read_papers(teacher) if teacher.is_dir() else {}
    if papers and papers["fingerprint"] != fingerprint(model):
        raise ValueError(
            f"the texts in {teacher} were written by {papers['model']}, not by {name}; let {name} write its own"
        )
