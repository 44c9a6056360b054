"""Jacobi Forcing as an objective of recipes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from saltus.core.picking import Coupling
from saltus.core.value_types import require_at_least
from saltus.methods.jacobi.training.block_packing import BlockMask, BlockNoise, CountedRows, NoiseMeasure, NoiseSchedule
from saltus.methods.jacobi.training.forcing import JacobiTrainingTask
from saltus.methods.jacobi.training.trajectories import Trajectory, read_trajectories, texts_to_train_on
from saltus.models.gated_lora import GatedLoraSettings
from saltus.training.data.hidden_states import Sample
from saltus.training.objective import Objective, TrainingInputs, decoding_commands
from saltus.training.settings import RECIPE_COUPLING, Recipe
from saltus.training.training_task import TrainingTask


@dataclass(frozen=True)
class JacobiForcingSettings:
    """Jacobi Forcing of a gated LoRA, whose drafts the unchanged model verifies, or of the model itself."""

    trains: Literal["adapter", "model"] = "adapter"
    rank: int = 16
    alpha: float | None = None  # default: the rank
    targets: tuple[str, ...] = ()  # last names of linear layers; empty: all
    noise_schedule: NoiseSchedule = "linear"  # linear, random, reverse, any
    mask: BlockMask = "noisy"  # noisy (NC), window (NC-IC), large, clean
    window: int = 8  # blocks in which the noise rises
    noise_measure: NoiseMeasure = "wrong"  # of an iterate: its share of wrong tokens, or of those from the first one on
    loss_rows: CountedRows = (
        "attending"  # in the consistency loss: all that attend to wrong tokens, or to one of their block
    )
    loss: Literal["kl", "ce"] = "kl"
    divide_by_blocks: bool = False  # divide the consistency loss, a mean, by the blocks of a text, as the authors' code
    text_weight: float = 1.0  # of the loss that limits the drift of a trained model
    anchor: Literal["text", "distributions"] = (
        "text"  # that loss: cross-entropy of the text, or divergence from the model
    )
    recompute: bool = False  # checkpoint activations: less memory, more time
    autocast: bool = False  # compute in bfloat16

    def __post_init__(self) -> None:
        assert self.noise and GatedLoraSettings(self.rank, self._alpha)  # they raise errors for their settings now
        require_at_least(self, text_weight=0)

    @property
    def _alpha(self) -> float:
        return float(self.rank) if self.alpha is None else self.alpha

    @property
    def gating(self) -> GatedLoraSettings | None:
        return GatedLoraSettings(self.rank, self._alpha, targets=self.targets) if self.trains == "adapter" else None

    @property
    def noise(self) -> BlockNoise:
        return BlockNoise(self.noise_schedule, self.mask, self.window, self.noise_measure, self.loss_rows)


class JacobiForcingObjective(Objective):
    """A model or an adapter trained on the iterates of Jacobi decoding; nothing is cached."""

    method, settings_type = "jacobi", JacobiForcingSettings
    collect_command = "jacobi"
    unused_keys = frozenset({"windows_per_text", "uniform_beta", "distillation_weight", "greedy_fraction"})
    unused_keys_hint = "training for Jacobi decoding has no {}; leave it out"

    def validate(self, recipe: Recipe, keys: Collection[str]) -> None:
        super().validate(recipe, keys)
        if recipe.coupling != RECIPE_COUPLING:
            raise ValueError(
                f"a recipe of kind {recipe.kind} learns the picks of its texts; leave coupling out, and write them with"
                f" saltus collect jacobi --coupling {recipe.coupling}"
            )
        if recipe.settings.trains == "model" and recipe.dtype != "float32":
            raise ValueError(
                f"a model's own weights are trained in float32, where small steps are not lost, not in {recipe.dtype};"
                " set dtype=float32, and autocast=true to compute in bfloat16"
            )

    def without_effect(self, recipe: Recipe) -> Mapping[str, str]:
        found = {"temperatures": "each text has its own; see saltus collect jacobi --temperature"}
        if recipe.settings.trains == "adapter":
            return found | dict.fromkeys(("text_weight", "anchor"), "an adapter changes no text; see trains=model")
        return found | dict.fromkeys(("rank", "alpha", "targets"), "the model itself is trained; see trains=adapter")

    def read_texts(self, path: Path) -> Sequence[Sample]:
        return read_trajectories(path)

    def select_texts(self, recipe: Recipe, paths: Sequence[Path]) -> Sequence[Any]:
        chosen = super().select_texts(recipe, paths)
        # for its errors, before a model is loaded; a run's checkpoint is identified by all that are chosen
        texts_to_train_on(chosen, recipe.data.max_length, recipe.settings.noise.window)
        return chosen

    def why_not_sharded(self, recipe: Recipe) -> str:
        whole = recipe.settings.trains == "model"
        return "only a frozen model's weights can be distributed; leave --fsdp out, or set trains=adapter" * whole

    def decoding_commands(self, recipe: Recipe, folder: str) -> list[str]:
        if recipe.settings.trains == "model":
            return decoding_commands(folder, self.method)
        return super().decoding_commands(recipe, folder)

    def coupling(self, recipe: Recipe, samples: Sequence[Sample]) -> Coupling:
        return next(sample.coupling for sample in samples if isinstance(sample, Trajectory))

    def make_task(self, inputs: TrainingInputs) -> TrainingTask:
        settings = inputs.recipe.settings
        trajectories = [sample for sample in inputs.samples if isinstance(sample, Trajectory)]
        return JacobiTrainingTask(
            inputs.network.model, trajectories, settings.gating,
            settings.noise, settings.loss, settings.text_weight, settings.anchor, settings.divide_by_blocks,
            inputs.recipe.data, inputs.model_name, settings.recompute, settings.autocast, inputs.tokenizer,
        )  # fmt: skip


OBJECTIVES = {"jacobi": JacobiForcingObjective()}
