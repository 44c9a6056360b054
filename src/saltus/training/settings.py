"""The settings of a training run, as a recipe's TOML file holds them. The names of fields are its keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

import torch

from saltus.core.sampling import Coupling
from saltus.networks.adapters.gated_lora import GatedLoraSettings
from saltus.networks.adapters.uniform_embedding import KINDS
from saltus.networks.draft_models.dflash import DFLASH, DFlashShape
from saltus.networks.draft_models.drafter import DrafterShape
from saltus.networks.draft_models.heads import HeadShape
from saltus.networks.kv_cache.memory_use import layer_sizes
from saltus.training.data.block_packing import BlockMask, BlockNoise, NoiseSchedule
from saltus.training.data.uniform_intervals import Truncation
from saltus.training.data.window_dataset import WindowSettings
from saltus.training.data.window_packing import UniformConditioning
from saltus.training.loop.training_loop import Schedule
from saltus.training.tasks.losses import DistillationSettings, Loss

Kind = Literal["drafter", "adapter", "heads", "jacobi"]
RECIPE_COUPLING: Coupling = "probability"  # of recipes that name none


@dataclass(frozen=True)
class DrafterSettings:
    """A small network beside the target, with attention heads of the target's size."""

    network: Literal["ptp", "dflash"] = "ptp"  # dflash: masks read projected states; other engines load it
    layers: int = 2
    intermediate: int = 768
    hidden_state_layers: tuple[int, ...] = ()  # numbers of target layers whose states are inputs, besides the last
    window: int = 6  # tokens of a draft
    vocabulary: int = 8192  # the most frequent tokens, which are drafted; 0: all of the target's
    mask_token: int | None = None  # whose embedding the queries of dflash start with; default: the last one
    embedding: str = "bits"  # of uniforms: bits, th, ar, fl
    embeds_temperature: bool = True  # conditioned on the temperature
    reads_uniforms: bool = True  # conditioned on uniforms; False: queries learn the target's distributions
    correction: int = 0  # width of the correction of each draft by the two tokens before it; 0: none
    autocast: bool = False  # compute in bfloat16

    def __post_init__(self) -> None:
        for name in ("layers", "intermediate", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"a drafter's {name} is {getattr(self, name)}, but must be 1 or more")
        if self.vocabulary < 0:
            raise ValueError(f"a drafter's vocabulary is {self.vocabulary}, but must be 1 or more, or 0 for all tokens")
        if self.network == DFLASH and (self.reads_uniforms or not self.hidden_state_layers):
            no_states = "no states but those of hidden_state_layers; name some"
            what = "no uniforms; set reads_uniforms=false" if self.reads_uniforms else no_states
            raise ValueError(f"the network dflash reads {what}")
        if self.network != DFLASH and self.mask_token is not None:
            raise ValueError("mask_token is for the network dflash; leave it out, or set network=dflash")
        if self.embedding not in KINDS:
            raise ValueError(f"a drafter's embedding is {self.embedding!r}, but must be one of {', '.join(KINDS)}")

    def shape(self, target: Any) -> DrafterShape | DFlashShape:
        """The shape for a Hugging Face model. Errors: ValueError for layers or tokens that it does not have."""
        config = target.config.get_text_config()
        if wrong := [layer for layer in self.hidden_state_layers if not 0 < layer < config.num_hidden_layers]:
            raise ValueError(
                f"hidden_state_layers has {wrong[0]}, but the model has {config.num_hidden_layers} layers; take fewer"
            )
        heads = config.num_attention_heads
        kv_heads, head_dim = layer_sizes(config)[0]
        if self.network == DFLASH:
            return self._dflash_shape(target, heads, kv_heads, head_dim)
        return DrafterShape(
            config.hidden_size, self.intermediate, self.hidden_state_layers, self.layers, heads, kv_heads,
            self.window, self.embedding, self.embeds_temperature, self.reads_uniforms, correction=self.correction,
        )  # fmt: skip

    def _dflash_shape(self, target: Any, heads: int, kv_heads: int, head_dim: int) -> DFlashShape:
        """Heads of the target's size, in numbers that 2, 4 and 8 devices can share."""
        config, embeddings = target.config.get_text_config(), target.get_input_embeddings().weight
        mask_token, count = self.mask_token, len(embeddings)
        if mask_token is None:
            mask_token = next(token for token in reversed(range(count)) if embeddings[torch.tensor([token])].any())
        if not 0 <= mask_token < count:
            raise ValueError(f"mask_token is {mask_token}, but the model has {count} tokens; take one of them")
        own, kv_heads = max(8, heads // 8 * 8), 1 << (kv_heads - 1).bit_length()
        return DFlashShape(
            config.hidden_size, self.intermediate, self.hidden_state_layers, mask_token, self.layers, own,
            math.gcd(own, kv_heads), head_dim, self.window, correction=self.correction,
        )  # fmt: skip


@dataclass(frozen=True)
class AdapterSettings:
    """A gated LoRA of the target, or of a student: another model, which drafts for the target."""

    student: str = ""  # a model with the target's vocabulary; empty: the target itself
    rank: int = 64
    alpha: float | None = None  # default: the rank
    dropout: float = 0.0
    targets: tuple[str, ...] = ()  # last names of linear layers; empty: all
    embedding: str = "bits"  # of uniforms: bits, th, ar, fl
    embeds_temperature: bool = True  # conditioned on the temperature
    form: UniformConditioning = "one-hot"
    loss: Loss = "ce"
    window: int = 16  # queries of a window; the first drafts nothing
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
        if not 0 <= self.student_windows <= 1:
            raise ValueError(f"student_windows is {self.student_windows}, but is a share, in [0, 1]")
        if self.inverse and self.student_windows:
            raise ValueError("inverse training learns given texts; leave student_windows out, or inverse")

    @property
    def gating(self) -> GatedLoraSettings:
        alpha = float(self.rank) if self.alpha is None else self.alpha
        return GatedLoraSettings(
            self.rank, alpha, self.dropout, self.targets, self.embedding, self.embeds_temperature, self.window
        )

    def distillation(self, beta: float) -> DistillationSettings:
        return DistillationSettings(self.form, self.loss, self.window, beta)


@dataclass(frozen=True)
class HeadsSettings:
    """Heads: the joint distribution of the next tokens, from the target's last hidden state."""

    circuit: Literal["ff", "cp", "hmm", "btree"] = "btree"
    window: int = 8  # positions of the joint distribution
    rank: int = 8  # states of each latent; ff has one
    directions: int = 16  # of the subspace in which components differ
    own: bool = False  # an unembedding for every position and component; for small vocabularies
    embeds_last_token: bool = True  # conditioned on the text's last token; else this token is position 0 of the window
    contextual: bool = True  # sum weights depend on the text
    homogeneous: bool = False  # all steps of a circuit share one table
    stay: float = 6.0  # initial logit for a latent to have its parent's state; 0: no preference
    layers: int = 0  # the target's last layers, which heads apply once more, adapted
    lora: int = 16  # rank of their adaptation
    vocabulary: int = 8192  # the most frequent tokens, which are drafted

    def __post_init__(self) -> None:
        if self.vocabulary < 1:
            raise ValueError(f"heads' vocabulary is {self.vocabulary}, but must be 1 or more")
        assert self._shape(1)  # it raises errors for its settings now

    def _shape(self, hidden: int) -> HeadShape:
        own = {one.name for one in fields(self)}
        return HeadShape(hidden, **{one.name: getattr(self, one.name) for one in fields(HeadShape) if one.name in own})

    def shape(self, target: Any) -> HeadShape:
        """The shape for a Hugging Face model. Errors: ValueError for more layers than it has."""
        config = target.config.get_text_config()
        if not 0 <= self.layers < config.num_hidden_layers:
            count = config.num_hidden_layers
            raise ValueError(f"heads adapt {self.layers} layers, but the model has {count}; take fewer")
        hidden_state_layers = (config.num_hidden_layers - self.layers,) if self.layers else ()
        return replace(self._shape(config.hidden_size), hidden_state_layers=hidden_state_layers)


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
    loss: Literal["kl", "ce"] = "kl"
    text_weight: float = 1.0  # of the loss that limits the drift of a trained model
    anchor: Literal["text", "distributions"] = (
        "text"  # that loss: cross-entropy of the text, or divergence from the model
    )
    recompute: bool = False  # checkpoint activations: less memory, more time
    autocast: bool = False  # compute in bfloat16

    def __post_init__(self) -> None:
        assert self.noise and GatedLoraSettings(self.rank, self._alpha)  # they raise errors for their settings now
        if self.text_weight < 0:
            raise ValueError(f"text_weight is {self.text_weight}, but must be 0 or more")

    @property
    def _alpha(self) -> float:
        return float(self.rank) if self.alpha is None else self.alpha

    @property
    def gating(self) -> GatedLoraSettings | None:
        return GatedLoraSettings(self.rank, self._alpha, targets=self.targets) if self.trains == "adapter" else None

    @property
    def noise(self) -> BlockNoise:
        return BlockNoise(self.noise_schedule, self.mask, self.window)


@dataclass(frozen=True)
class Recipe:
    """A training run: for which model, on what, and how long. The kind names its objective and its own section."""

    kind: Kind
    schedule: Schedule
    about: str = ""
    time: str = ""  # that it takes, and where
    model: str = "smollm2-135m"
    chat_template: str = ""  # with which the teacher's texts are collected, if the model has none of its own
    dtype: str = "auto"  # of the target while it reads texts
    temperatures: tuple[float, ...] = (0.7, 1.0)  # besides 0
    top_k: int = 0  # of the target's distributions for which it drafts; 0: all tokens
    top_p: float = 1.0
    coupling: Coupling = RECIPE_COUPLING  # whose uniforms its queries are conditioned on; gumbel has none
    teacher_texts: int = 0  # number of texts, evenly spread over the teacher's; 0: all
    data: WindowSettings = field(default_factory=WindowSettings)
    drafter: DrafterSettings = field(default_factory=DrafterSettings)
    adapter: AdapterSettings = field(default_factory=AdapterSettings)
    heads: HeadsSettings = field(default_factory=HeadsSettings)
    jacobi: JacobiForcingSettings = field(default_factory=JacobiForcingSettings)

    def __post_init__(self) -> None:
        assert self.truncation is not None  # it raises errors for its settings now
        if wrong := [each for each in self.temperatures if not each > 0]:
            raise ValueError(f"temperatures are those besides 0, and above it; leave {wrong[0]:g} out")
        if not self.temperatures and self.kind != "jacobi":
            raise ValueError("temperatures is empty; give one or more, above 0")

    @property
    def truncation(self) -> Truncation:
        """Top-k and top-p of the uniform intervals."""
        return Truncation(self.top_k, self.top_p)

    @property
    def identity(self) -> Mapping[str, Any]:
        """All settings that can change the result, as checkpoints and cards hold them."""
        omitted = ["about", "time", "chat_template", *(kind for kind in get_args(Kind) if kind != self.kind)]
        if self.coupling == RECIPE_COUPLING:  # jacobi recipes name none: that of the texts counts
            omitted.append("coupling")
        if not self.truncation:
            omitted += ["top_k", "top_p"]
        found = {name: value for name, value in asdict(self).items() if name not in omitted}
        for name in ("inverse", "student_windows"):  # without them, too
            if not found.get("adapter", {}).get(name, True):
                del found["adapter"][name]
        if found.get("drafter", {}).get("network") == "ptp":
            del found["drafter"]["network"], found["drafter"]["mask_token"]
        return found
