"""The two ways to train for PTP: a drafter beside the target, and a gated adapter of the target or of a student."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from saltus.core.forward import QueryStart
from saltus.methods.ptp.network import DrafterShape
from saltus.methods.ptp.training.adapter import AdapterTrainingTask
from saltus.methods.ptp.training.drafter import DrafterTrainingTask
from saltus.methods.ptp.training.text_intervals import collect_uniform_intervals, load_uniform_intervals
from saltus.methods.shared.adapter_files import load_initial_adapter
from saltus.methods.shared.query_chains import UniformConditioning
from saltus.models.gated_lora import EmbeddingInit, GatedLoraSettings
from saltus.models.memory_use import layer_sizes
from saltus.models.uniform_embedding import KINDS
from saltus.training.losses import DistillationSettings, Loss
from saltus.training.objective import CachedStateObjective, Objective, TrainingInputs, check_hidden_state_layers
from saltus.training.query_drafter_task import require_sizes
from saltus.training.settings import Recipe
from saltus.training.training_task import TrainingTask


@dataclass(frozen=True)
class DrafterSettings:
    """A small network beside the target, with attention heads of the target's size."""

    layers: int = 2
    intermediate: int = 768
    hidden_state_layers: tuple[int, ...] = ()  # numbers of target layers whose states are inputs, besides the last
    window: int = 6  # tokens of a draft
    vocabulary: int = 8192  # the most frequent tokens, which are drafted; 0: all of the target's
    embedding: str = "bits"  # of uniforms: bits, scalar, thermometer, arithmetic or interpolated
    embeds_temperature: bool = True  # conditioned on the temperature
    reads_uniforms: bool = True  # conditioned on uniforms; False: queries learn the target's distributions
    correction: int = 0  # width of the correction of each draft by the two tokens before it; 0: none
    autocast: bool = False  # compute in bfloat16

    def __post_init__(self) -> None:
        require_sizes(self)
        if self.embedding not in KINDS:
            raise ValueError(f"a drafter's embedding is {self.embedding!r}, but must be one of {', '.join(KINDS)}")

    def shape(self, target: Any) -> DrafterShape:
        """The shape for a Hugging Face model. Errors: ValueError for layers or tokens that it does not have."""
        check_hidden_state_layers(self.hidden_state_layers, target)
        config = target.config.get_text_config()
        heads, kv_heads = even_heads(config.hidden_size, config.num_attention_heads, layer_sizes(config)[0][0])
        return DrafterShape(
            config.hidden_size, self.intermediate, self.hidden_state_layers, self.layers, heads, kv_heads,
            self.window, self.embedding, self.embeds_temperature, self.reads_uniforms, correction=self.correction,
        )  # fmt: skip


def even_heads(hidden: int, heads: int, kv_heads: int) -> tuple[int, int]:
    """Heads of attention, and those of keys and values, with an even size; the target's, if they have one.

    A target's own may be of a size that its hidden size is no multiple of.
    """
    fitting = (count for count in range(heads, 0, -1) if hidden % count == 0 and hidden // count % 2 == 0)
    found = next(fitting, heads)
    return found, kv_heads if found == heads else math.gcd(found, kv_heads)


@dataclass(frozen=True)
class AdapterSettings:
    """A gated LoRA of the target, or of a student: another model, which drafts for the target."""

    student: str = ""  # a model with the target's vocabulary; empty: the target itself
    rank: int = 64
    alpha: float | None = None  # default: the rank
    dropout: float = 0.0
    targets: tuple[str, ...] = ()  # last names of linear layers; empty: all
    embedding: str = "bits"  # of uniforms: bits, scalar, thermometer, arithmetic or interpolated
    embedding_init: EmbeddingInit = "zeros"  # its weights: zeros, or normal with the deviation of token embeddings
    embeds_temperature: bool = True  # conditioned on the temperature
    query_start: QueryStart = "blank"  # last-token: the first query reads the last token, at that token's position
    form: UniformConditioning = "one-hot"
    loss: Loss = "ce"
    window: int = 16  # queries of a window; the first drafts nothing
    window_growth: float = 0.0  # fraction of the steps in which windows grow to that, from two queries
    inverse: bool = False  # uniforms of the adapter's own distributions, not of the target's (PTP, Alg. 3)
    student_windows: float = 0.0  # share of the sampled windows whose tokens the adapter drafts (PTP, Alg. 2)
    recompute: bool = False  # checkpoint activations: less memory, more time
    autocast: bool = False  # compute in bfloat16

    def __post_init__(self) -> None:
        assert self.gating and self.distillation(1.0)  # they raise errors for their settings now
        if self.window < 2:
            raise ValueError("an adapter's window is 1, but a group's first query drafts nothing; take 2 or more")
        if self.inverse and (self.form, self.loss) != ("categorical", "ce"):
            raise ValueError("inverse training is for the form categorical and the loss ce; set form=categorical")
        if not 0 <= self.window_growth <= 1:
            raise ValueError(f"window_growth is {self.window_growth}, but is a fraction of the steps, in [0, 1]")
        if not 0 <= self.student_windows <= 1:
            raise ValueError(f"student_windows is {self.student_windows}, but is a share, in [0, 1]")
        if self.inverse and self.student_windows:
            raise ValueError("inverse training learns given texts; leave student_windows out, or inverse")

    @property
    def gating(self) -> GatedLoraSettings:
        alpha = float(self.rank) if self.alpha is None else self.alpha
        return GatedLoraSettings(
            self.rank, alpha, self.dropout, self.targets, self.embedding, self.embeds_temperature, self.window,
            self.query_start,
        )  # fmt: skip

    def distillation(self, beta: float) -> DistillationSettings:
        return DistillationSettings(self.form, self.loss, self.window, beta)

    @property
    def identity(self) -> Mapping[str, Any]:
        """The settings that can change the result; those of rare kinds only where they are given."""
        rare = "inverse", "student_windows", "query_start", "embedding_init", "window_growth"
        defaults = {each.name: each.default for each in fields(self) if each.name in rare}
        return {name: value for name, value in asdict(self).items() if name not in rare or value != defaults[name]}


class DrafterObjective(CachedStateObjective):
    """A drafter that reads the target's hidden states."""

    method, settings_type, task = "ptp", DrafterSettings, DrafterTrainingTask

    def validate(self, recipe: Recipe, keys: Collection[str]) -> None:
        super().validate(recipe, keys)
        if recipe.settings.reads_uniforms and recipe.coupling == "gumbel":
            raise ValueError(
                "the coupling gumbel has no uniforms to condition queries on; set reads_uniforms=false, or"
                " coupling=probability or token-order"
            )

    def why_not_truncated(self, recipe: Recipe) -> str:
        reads_uniforms = recipe.settings.reads_uniforms and not recipe.data.distillation_weight
        return "" if reads_uniforms else "set reads_uniforms=true and distillation_weight=0, or leave them out"


class AdapterObjective(Objective):
    """A gated adapter of the target or of a student (PTP), trained on texts and their uniform intervals."""

    method, settings_type = "ptp", AdapterSettings
    data_folder = "intervals"
    unused_keys = frozenset({"distillation_weight"})
    unused_keys_hint = "an adapter has its own loss for distributions; leave {} out and set loss=kl"

    def validate(self, recipe: Recipe, keys: Collection[str]) -> None:
        super().validate(recipe, keys)
        if recipe.coupling == "gumbel" and recipe.settings.form != "independent":
            raise ValueError(
                f"the coupling gumbel has no uniforms for the form {recipe.settings.form}; set form=independent"
            )
        if recipe.settings.inverse and recipe.settings.student:
            raise ValueError("inverse training has no teacher; leave student out, and train that model by --model")

    def why_not_truncated(self, recipe: Recipe) -> str:
        return "" if recipe.settings.form == "one-hot" else "set form=one-hot, or leave them out"

    def without_effect(self, recipe: Recipe) -> Mapping[str, str]:
        found: dict[str, str] = {}
        if not self.reads_uniforms(recipe):
            unread = ("uniform_beta", "embedding", "embedding_init")
            found |= dict.fromkeys(unread, "no query has a uniform")
        if self.needs_temperatures(recipe):
            found["greedy_fraction"] = "windows are at the temperature of their text"
        return found

    def needs_temperatures(self, recipe: Recipe) -> bool:
        return recipe.settings.form != "one-hot"

    def reads_uniforms(self, recipe: Recipe) -> bool:
        return recipe.settings.form != "independent"

    def why_not_sharded(self, recipe: Recipe) -> str:
        return ""

    def student_name(self, recipe: Recipe) -> str:
        return recipe.settings.student

    def check_initial(self, inputs: TrainingInputs, folder: Path) -> None:
        settings, model, name = inputs.recipe.settings, inputs.network.model, inputs.model_name
        if inputs.student is not None:
            model, name = inputs.student, settings.student
        load_initial_adapter(folder, model, name, settings.gating)

    def collect(self, inputs: TrainingInputs) -> Iterator[int]:
        recipe = inputs.recipe
        return collect_uniform_intervals(
            inputs.network.model, inputs.samples, self.cache_folder(inputs), recipe.temperatures,
            recipe.data.max_length, recipe.coupling, recipe.truncation, inputs.processes, inputs.sharded,
        )  # fmt: skip

    def make_task(self, inputs: TrainingInputs) -> TrainingTask:
        settings, windows = inputs.recipe.settings, inputs.recipe.data
        model, name, teacher = inputs.network.model, inputs.model_name, None
        if inputs.student is not None:
            model, name, teacher = inputs.student, settings.student, model
        return AdapterTrainingTask(
            model, load_uniform_intervals(self.cache_folder(inputs), len(inputs.samples)), settings.gating,
            settings.distillation(windows.uniform_beta), windows, name, settings.recompute, settings.autocast, teacher,
            inputs.model_name, settings.inverse, settings.student_windows, inputs.recipe.truncation,
            settings.embedding_init, round(settings.window_growth * inputs.recipe.schedule.steps),
        )  # fmt: skip


OBJECTIVES = {"drafter": DrafterObjective(), "adapter": AdapterObjective()}
