"""The objectives that a recipe's kind selects: which texts each one needs, what it caches of them, and its task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saltus.core.sampling import Coupling
from saltus.networks.draft_models.dflash import DFLASH
from saltus.training.data.hidden_states import Sample, collect_hidden_states, load_hidden_states
from saltus.training.data.teacher_texts import read_teacher_texts
from saltus.training.data.text_intervals import collect_uniform_intervals, load_uniform_intervals
from saltus.training.data.trajectories import Trajectory, read_trajectories
from saltus.training.loop.processes import ONE_PROCESS, Processes
from saltus.training.settings import RECIPE_COUPLING, Recipe
from saltus.training.tasks.adapter import AdapterTrainingTask, load_initial_adapter
from saltus.training.tasks.cached_state_task import CachedStateTask
from saltus.training.tasks.drafter import DrafterTrainingTask
from saltus.training.tasks.heads import HeadsTrainingTask
from saltus.training.tasks.jacobi_forcing import JacobiTrainingTask
from saltus.training.tasks.training_task import TrainingTask


@dataclass(frozen=True, eq=False)
class TrainingInputs:
    """A recipe, the teacher's texts, the loaded models, and the work folder."""

    recipe: Recipe
    samples: Sequence[Sample]
    network: Any  # the target, a CausalNetwork
    model_name: str
    work_folder: Path
    student: Any = None  # the Hugging Face model that `Objective.student_name` names
    tokenizer: Any = None  # saved with a trained model
    processes: Processes = ONE_PROCESS
    sharded: bool = False  # the models' weights are distributed over the processes

    @property
    def data_folder(self) -> Path:
        """What is cached of the teacher's texts."""
        return self.work_folder / OBJECTIVES[self.recipe.kind].data_folder


class Objective(ABC):
    """One way to train something that drafts."""

    method: str  # that drafts with the result
    collect_command: str = "text"  # of `saltus collect`, which writes its texts
    data_folder: str = "states"  # inside the work folder
    has_matrices: bool = False  # weights for the optimizer muon
    unused_window_keys: frozenset[str] = frozenset()
    unused_keys_hint: str = ""

    def validate(self, recipe: Recipe, window_keys: Collection[str]) -> None:
        """Errors: ValueError for settings that mean nothing here. `window_keys` are those that the recipe gives."""
        if unused := sorted(self.unused_window_keys & set(window_keys)):
            raise ValueError(self.unused_keys_hint.format(unused[0]))
        if recipe.truncation and (why := self.why_not_truncated(recipe)):
            raise ValueError(f"top_k and top_p are for queries that are conditioned on their own uniforms; {why}")
        if recipe.schedule.optimizer == "muon" and not self.has_matrices:
            raise ValueError(f"a recipe of kind {recipe.kind} has no matrices for muon; take the optimizer adamw")

    def why_not_truncated(self, recipe: Recipe) -> str:
        """Why top-k and top-p mean nothing here, with the cure; empty if they do.

        Where distributions are learned, decoding would cut them once more.
        """
        return f"a recipe of kind {recipe.kind} has none, so leave them out"

    def why_not_sharded(self, recipe: Recipe) -> str:
        """Why a model's weights cannot be distributed over processes, with the cure; empty if they can."""
        return f"a recipe of kind {recipe.kind} trains on stored states; leave --fsdp out"

    def read_texts(self, path: Path) -> Sequence[Sample]:
        """The teacher's texts. Errors: ValueError."""
        return read_teacher_texts(path)

    def student_name(self, recipe: Recipe) -> str:
        """The model to train where it is not the target; else empty."""
        return ""

    def coupling(self, recipe: Recipe, samples: Sequence[Sample]) -> Coupling:
        """Whose uniforms or picks the result is trained on."""
        return recipe.coupling

    def check_initial(self, inputs: TrainingInputs, folder: Path) -> None:  # noqa: B027  needed where `collect` is long
        """Errors: ValueError where training cannot start with the weights of this folder."""

    @abstractmethod
    def collect(self, inputs: TrainingInputs) -> Iterator[int]:
        """Cache what training needs of the texts in the data folder; yields how many texts are done."""

    @abstractmethod
    def make_task(self, inputs: TrainingInputs) -> TrainingTask:
        """The task, before its first step."""


class CachedStateObjective(Objective):
    """A small network trained on the target's hidden states, which are computed once: a drafter (PTP), heads (MtPC)."""

    has_matrices = True

    def __init__(self, method: str, task: type[CachedStateTask]) -> None:
        self.method, self.task = method, task

    def validate(self, recipe: Recipe, window_keys: Collection[str]) -> None:
        super().validate(recipe, window_keys)
        if recipe.kind == "drafter" and recipe.drafter.reads_uniforms and recipe.coupling == "gumbel":
            raise ValueError(
                "the coupling gumbel has no uniforms to condition queries on; set reads_uniforms=false, or"
                " coupling=probability or token-order"
            )
        if recipe.kind == "drafter" and recipe.drafter.network == DFLASH and "distillation_weight" in window_keys:
            raise ValueError("the network dflash predicts nothing at context positions; leave distillation_weight out")

    def why_not_truncated(self, recipe: Recipe) -> str:
        if recipe.kind != "drafter":
            return super().why_not_truncated(recipe)
        reads_uniforms = recipe.drafter.reads_uniforms and not recipe.data.distillation_weight
        return "" if reads_uniforms else "set reads_uniforms=true and distillation_weight=0, or leave them out"

    def check_initial(self, inputs: TrainingInputs, folder: Path) -> None:
        model = inputs.network.model
        shape = getattr(inputs.recipe, inputs.recipe.kind).shape(model)
        self.task.load_initial(folder, model, inputs.model_name, shape)

    def collect(self, inputs: TrainingInputs) -> Iterator[int]:
        recipe, network = inputs.recipe, inputs.network
        network.add_hidden_state_layers(getattr(recipe, recipe.kind).shape(network.model).hidden_state_layers)
        return collect_hidden_states(
            network, inputs.samples, inputs.data_folder, recipe.temperatures, recipe.coupling, recipe.truncation,
            inputs.processes,
        )  # fmt: skip

    def make_task(self, inputs: TrainingInputs) -> TrainingTask:
        recipe, model = inputs.recipe, inputs.network.model
        settings, corpus = getattr(recipe, recipe.kind), load_hidden_states(inputs.data_folder)
        task = self.task(model, corpus, settings.shape(model), settings.vocabulary, recipe.data, inputs.model_name)
        task.autocast = getattr(settings, "autocast", False)
        return task


class AdapterObjective(Objective):
    """A gated adapter of the target or of a student (PTP), trained on texts and their uniform intervals."""

    method = "ptp"
    data_folder = "edges"
    unused_window_keys = frozenset({"distillation_weight"})
    unused_keys_hint = "an adapter has its own loss for distributions; leave {} out and set loss=kl"

    def validate(self, recipe: Recipe, window_keys: Collection[str]) -> None:
        super().validate(recipe, window_keys)
        if recipe.coupling == "gumbel" and recipe.adapter.form != "independent":
            raise ValueError(
                f"the coupling gumbel has no uniforms for the form {recipe.adapter.form}; set form=independent"
            )
        if recipe.adapter.inverse and recipe.adapter.student:
            raise ValueError("inverse training has no teacher; leave student out, and train that model by --model")

    def why_not_truncated(self, recipe: Recipe) -> str:
        return "" if recipe.adapter.form == "one-hot" else "set form=one-hot, or leave them out"

    def why_not_sharded(self, recipe: Recipe) -> str:
        return ""

    def student_name(self, recipe: Recipe) -> str:
        return recipe.adapter.student

    def check_initial(self, inputs: TrainingInputs, folder: Path) -> None:
        settings, model, name = inputs.recipe.adapter, inputs.network.model, inputs.model_name
        if inputs.student is not None:
            model, name = inputs.student, settings.student
        load_initial_adapter(folder, model, name, settings.gating)

    def collect(self, inputs: TrainingInputs) -> Iterator[int]:
        recipe = inputs.recipe
        return collect_uniform_intervals(
            inputs.network.model, inputs.samples, inputs.data_folder, recipe.temperatures, recipe.data.max_length,
            recipe.coupling, recipe.truncation, inputs.processes, inputs.sharded,
        )  # fmt: skip

    def make_task(self, inputs: TrainingInputs) -> TrainingTask:
        settings, windows = inputs.recipe.adapter, inputs.recipe.data
        model, name, teacher = inputs.network.model, inputs.model_name, None
        if inputs.student is not None:
            model, name, teacher = inputs.student, settings.student, model
        return AdapterTrainingTask(
            model, load_uniform_intervals(inputs.data_folder), settings.gating,
            settings.distillation(windows.uniform_beta), windows, name, settings.recompute, settings.autocast, teacher,
            inputs.model_name, settings.inverse, settings.student_windows, inputs.recipe.truncation,
        )  # fmt: skip


class JacobiForcingObjective(Objective):
    """A model or an adapter trained on the iterates of Jacobi decoding; nothing is cached."""

    method = "jacobi"
    collect_command = "jacobi"
    unused_window_keys = frozenset({"windows_per_text", "uniform_beta", "distillation_weight", "greedy_fraction"})
    unused_keys_hint = "training for Jacobi decoding has no {}; leave it out"

    def validate(self, recipe: Recipe, window_keys: Collection[str]) -> None:
        super().validate(recipe, window_keys)
        if recipe.coupling != RECIPE_COUPLING:
            raise ValueError(
                f"a recipe of kind {recipe.kind} learns the picks of its texts; leave coupling out, and write them with"
                f" saltus collect jacobi --coupling {recipe.coupling}"
            )

    def read_texts(self, path: Path) -> Sequence[Sample]:
        return read_trajectories(path)

    def why_not_sharded(self, recipe: Recipe) -> str:
        whole = recipe.jacobi.trains == "model"
        return "only a frozen model's weights can be distributed; leave --fsdp out, or set trains=adapter" * whole

    def coupling(self, recipe: Recipe, samples: Sequence[Sample]) -> Coupling:
        return next(one.coupling for one in samples if isinstance(one, Trajectory))

    def collect(self, inputs: TrainingInputs) -> Iterator[int]:
        return iter((len(inputs.samples),))

    def make_task(self, inputs: TrainingInputs) -> TrainingTask:
        settings = inputs.recipe.jacobi
        return JacobiTrainingTask(
            inputs.network.model, [one for one in inputs.samples if isinstance(one, Trajectory)], settings.gating,
            settings.noise, settings.loss, settings.text_weight, settings.anchor, inputs.recipe.data,
            inputs.model_name, settings.recompute, settings.autocast, inputs.tokenizer,
        )  # fmt: skip


OBJECTIVES: dict[str, Objective] = {  # by a recipe's kind
    "drafter": CachedStateObjective("ptp", DrafterTrainingTask),
    "adapter": AdapterObjective(),
    "heads": CachedStateObjective("mtpc", HeadsTrainingTask),
    "jacobi": JacobiForcingObjective(),
}
