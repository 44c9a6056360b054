"""What a way to train has to say: which texts it needs, what it caches of them, and its tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from saltus.core.picking import Coupling
from saltus.loading.metadata import METADATA_FILE, read_metadata
from saltus.training.cached_state_task import CachedStateTask
from saltus.training.data.hidden_states import Sample, collect_hidden_states, load_hidden_states
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.teacher_texts import read_teacher_texts
from saltus.training.data.window_dataset import SAME_PROMPT
from saltus.training.loop.processes import ONE_PROCESS, Processes
from saltus.training.settings import Recipe
from saltus.training.training_task import TrainingTask

MIN_COMPLETION_TOKENS = 9  # of a teacher's text that is used
# the keys of a recipe that describe a target and its texts
TARGET_KEYS = frozenset(
    {"model", "chat_template", "dtype", "temperatures", "top_k", "top_p", "coupling", "teacher_texts"}
)


@dataclass(frozen=True, eq=False)
class TrainingInputs:
    """A recipe, its texts, the loaded models, and the work folder."""

    recipe: Recipe
    samples: Sequence[Any]  # of `Objective.select_texts`
    network: Any  # the target, a CausalNetwork; None where the objective needs none
    model_name: str
    work_folder: Path
    student: Any = None  # the Hugging Face model that `Objective.student_name` names
    tokenizer: Any = None  # saved with a trained model
    processes: Processes = ONE_PROCESS
    sharded: bool = False  # the models' weights are distributed over the processes
    initial_folder: Path | None = None  # an earlier result, whose weights the run starts with
    device: str = "cpu"  # of a model that the objective makes


class Objective(ABC):
    """One way to train something that drafts, or a model for a method.

    By default its texts are a teacher's, and the network of a target is loaded, which wrote them.
    """

    method: str  # that uses the result
    settings_type: type[Any]  # a frozen dataclass: the recipe's table of the objective's kind
    needs_target: bool = True  # False: it makes a model of its own, and its texts are anybody's
    collect_command: str = "text"  # of `saltus collect`, which writes its texts
    data_folder: str = "states"  # inside the work folder
    has_matrices: bool = False  # weights for the optimizer muon
    unused_keys: frozenset[str] = frozenset()  # of recipes and of their table [data]
    unused_keys_hint: str = ""

    def validate(self, recipe: Recipe, keys: Collection[str]) -> None:
        """Errors: ValueError for settings that mean nothing here. The recipe and its table [data] give these `keys`."""
        if unused := sorted(self.unused_keys & set(keys)):
            raise ValueError(self.unused_keys_hint.format(unused[0]))
        if recipe.truncation and (why := self.why_not_truncated(recipe)):
            raise ValueError(f"top_k and top_p are for queries that are conditioned on their own uniforms; {why}")
        if recipe.schedule.optimizer == "muon" and not self.has_matrices:
            raise ValueError(f"a recipe of kind {recipe.kind} has no matrices for muon; take the optimizer adamw")

    def without_effect(self, recipe: Recipe) -> Mapping[str, str]:
        """Settings that change nothing under the others of this recipe, and why."""
        return {}

    def needs_temperatures(self, recipe: Recipe) -> bool:
        """True if the recipe's temperatures must be those of the texts: their distributions are learned."""
        return False

    def resolve_initial(self, folder: Path) -> Path:
        """The folder of an earlier result."""
        return folder

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

    def select_texts(self, recipe: Recipe, paths: Sequence[Path]) -> Sequence[Any]:
        """Texts that are long enough, as many as the recipe takes, chosen by its seed. Errors: ValueError."""
        texts = [text for path in paths for text in self.read_texts(path)]
        long_enough = [sample for sample in texts if len(sample.completion) >= MIN_COMPLETION_TOKENS]
        if len(long_enough) < 2:
            named = " and ".join(map(str, paths))
            raise ValueError(
                f"{named} holds fewer than two texts of {MIN_COMPLETION_TOKENS} tokens or more; collect more"
            )
        first = _question(long_enough[0])
        if all(_question(sample) == first for sample in long_enough):  # before a model reads them
            raise ValueError(SAME_PROMPT)
        others = {round(sample.temperature, 3) for sample in long_enough} - {0.0, *recipe.temperatures}
        if others and self.needs_temperatures(recipe):
            all_of_them = ",".join(f"{each:g}" for each in sorted({*others, *recipe.temperatures}))
            raise ValueError(
                f"a text was written at temperature {min(others):g}, whose distributions the recipe does not learn; set"
                f" temperatures=[{all_of_them}]"
            )
        count = min(recipe.teacher_texts or len(long_enough), len(long_enough))
        chosen = seeded_generator(recipe.data.seed, "texts").permutation(len(long_enough))[:count]
        return [long_enough[number] for number in sorted(chosen)]

    def describe_texts(self, recipe: Recipe, samples: Sequence[Any]) -> dict[str, Any]:
        """What the card of a result says of the texts."""
        tokens = sum(len(sample.prompt) + len(sample.completion) for sample in samples)
        coupling = self.coupling(recipe, samples)
        return {"coupling": coupling, "teacher_texts": len(samples), "teacher_tokens": tokens}

    def student_name(self, recipe: Recipe) -> str:
        """The model to train where it is not the target; else empty."""
        return ""

    def coupling(self, recipe: Recipe, samples: Sequence[Sample]) -> Coupling:
        """Whose uniforms or picks the result is trained on."""
        return recipe.coupling

    def cache_folder(self, inputs: TrainingInputs) -> Path:
        """Where `collect` caches what training needs of the texts."""
        return inputs.work_folder / self.data_folder

    def check_initial(self, inputs: TrainingInputs, folder: Path) -> None:  # noqa: B027  needed where `collect` is long
        """Errors: ValueError where training cannot start with the weights of this folder."""

    def collect(self, inputs: TrainingInputs) -> Iterator[int]:
        """Cache what training needs of the texts in the data folder; yields how many texts are done."""
        return iter((len(inputs.samples),))

    def reads_uniforms(self, recipe: Recipe) -> bool:
        """True if sampled texts must be decoded under the recipe's coupling for the result to draft well."""
        return bool(getattr(recipe.settings, "reads_uniforms", False))

    def decoding_commands(self, recipe: Recipe, folder: str) -> list[str]:
        """Commands that decode with the result in a folder, and that measure what it brings."""
        coupling = f" --coupling {recipe.coupling}" if self.reads_uniforms(recipe) else ""
        return decoding_commands(quote(recipe.model), self.method, f" --option {self.method}.model={folder}{coupling}")

    @abstractmethod
    def make_task(self, inputs: TrainingInputs) -> TrainingTask:
        """The task, before its first step."""

    def next_task(self, inputs: TrainingInputs, task: TrainingTask) -> TrainingTask | None:
        """What is trained after this task, on its result, with a phase and a schedule of its own; None: nothing."""
        return None


def decoding_commands(model: str, method: str, option: str = "") -> list[str]:
    """Commands that decode with a model by a method, and that measure it."""
    return [
        f'saltus generate --model {model} --method {method}{option} "Why is the sky blue?"',
        f"saltus bench --model {model} --methods lookup,{method},{method}+lookup{option}",
    ]


def _question(sample: Sample) -> list[int]:
    """What texts are held out by: a prompt, or the text where there is none."""
    return [*sample.prompt] if len(sample.prompt) > 1 else sample.tokens


class CachedStateObjective(Objective):
    """A small network trained on the target's hidden states, which are computed once.

    Its settings have the network's `shape` for a target (a Hugging Face model), and its `vocabulary`. A shape has the
    `window`, the tokens that a draft call predicts, and the `hidden_state_layers` that are read besides the last.
    """

    task: type[CachedStateTask]
    has_matrices = True

    def without_effect(self, recipe: Recipe) -> Mapping[str, str]:
        found: dict[str, str] = {}
        if not self.reads_uniforms(recipe):
            found |= dict.fromkeys(("uniform_beta", "embedding"), "no query has a uniform")
        if self.needs_temperatures(recipe):
            found["greedy_fraction"] = "windows are at the temperature of their text"
        return found

    def needs_temperatures(self, recipe: Recipe) -> bool:
        return self.task.learns_distributions(recipe.coupling)

    def check_initial(self, inputs: TrainingInputs, folder: Path) -> None:
        model, settings = inputs.network.model, inputs.recipe.settings
        self.task.load_initial(folder, model, inputs.model_name, settings.shape(model))
        training = read_metadata(folder).training if (folder / METADATA_FILE).exists() else {}
        trained = training.get("recipe", {}).get(inputs.recipe.kind, {}).get("vocabulary")
        if trained not in (None, settings.vocabulary):
            raise ValueError(
                f"{folder} was trained for a vocabulary of {trained}, which it keeps; set vocabulary={trained}"
            )

    def collect(self, inputs: TrainingInputs) -> Iterator[int]:
        recipe, network = inputs.recipe, inputs.network
        network.add_hidden_state_layers(recipe.settings.shape(network.model).hidden_state_layers)
        return collect_hidden_states(
            network, inputs.samples, self.cache_folder(inputs), recipe.temperatures, recipe.coupling,
            recipe.truncation, inputs.processes,
        )  # fmt: skip

    def make_task(self, inputs: TrainingInputs) -> TrainingTask:
        recipe, model, settings = inputs.recipe, inputs.network.model, inputs.recipe.settings
        corpus = load_hidden_states(self.cache_folder(inputs), len(inputs.samples))
        task = self.task(model, corpus, settings.shape(model), settings.vocabulary, recipe.data, inputs.model_name)
        task.autocast = getattr(settings, "autocast", False)
        return task


def check_hidden_state_layers(layers: Sequence[int], target: Any) -> None:
    """Raise ValueError for numbers of layers that a Hugging Face model does not have."""
    count = target.config.get_text_config().num_hidden_layers
    if wrong := [layer for layer in layers if not 0 < layer < count]:
        raise ValueError(
            f"hidden_state_layers has {wrong[0]}, but the model has {count} layers; take numbers from 1 to {count - 1}"
        )
