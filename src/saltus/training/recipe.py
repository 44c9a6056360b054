"""Read what a training run is made of: TOML files, whose every key is a field of the dataclasses below."""

from __future__ import annotations

import difflib
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from saltus.networks.adapters.gated_lora import GatedLoraSettings
from saltus.networks.adapters.uniform_embedding import KINDS
from saltus.networks.draft_models.drafter import DrafterShape
from saltus.networks.draft_models.heads import HeadShape
from saltus.training.data.block_packing import BlockMask, BlockNoise, NoiseSchedule
from saltus.training.data.window_dataset import WindowSettings
from saltus.training.data.window_packing import UniformConditioning
from saltus.training.loop.training_loop import Schedule
from saltus.training.tasks.distillation import Loss, Objective

WINDOW_ONLY_KEYS = {"windows", "placement", "laws", "greedy"}  # lessons' settings that blocks have not
RECIPES_FOLDER = Path(__file__).parent / "recipes"
NOT_SETTABLE = ("kind", "about", "time")  # what a recipe says of itself
METHODS = {  # that draft with what a kind of recipe trains
    "drafter": "ptp", "adapter": "ptp", "heads": "mtpc", "forcing": "jacobi",
}  # fmt: skip


@dataclass(frozen=True)
class DrafterSettings:
    """A small network beside the target; its heads are like the target's."""

    layers: int = 2
    intermediate: int = 768
    taps: tuple[int, ...] = ()  # states after so many of the target's layers are read, besides the last
    window: int = 6  # tokens of a pass
    vocabulary: int = 8192  # tokens that are drafted: the most frequent
    embedding: str = "bits"  # of uniforms: bits, th, ar, fl
    told: bool = True  # the temperature
    informed: bool = True  # False: no uniform is told, which is independent prediction

    def __post_init__(self) -> None:
        for name in ("layers", "intermediate", "window", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"a drafter's {name} is {getattr(self, name)}, but must be 1 or more")
        if self.embedding not in KINDS:
            raise ValueError(f"a drafter's embedding is {self.embedding!r}, but must be one of {', '.join(KINDS)}")

    def shape(self, target: Any) -> DrafterShape:
        """For this Hugging Face model. Errors: ValueError for taps that it has not."""
        config = target.config.get_text_config()
        if wrong := [tap for tap in self.taps if not 0 < tap < config.num_hidden_layers]:
            raise ValueError(f"taps has {wrong[0]}, but the model has {config.num_hidden_layers} layers; take fewer")
        heads = config.num_attention_heads
        shared = getattr(config, "num_key_value_heads", None) or heads
        return DrafterShape(
            config.hidden_size, self.intermediate, self.taps, self.layers, heads, shared,
            self.window, self.embedding, self.told, self.informed,
        )  # fmt: skip


@dataclass(frozen=True)
class AdapterSettings:
    """A gated LoRA of the target, or of a student, a model of its own that drafts for it."""

    student: str = ""  # a model of the target's vocabulary; empty: the target itself
    rank: int = 64
    alpha: float | None = None  # of rank, where none is given
    dropout: float = 0.0
    targets: tuple[str, ...] = ()  # last names of linear layers; empty: all
    embedding: str = "bits"  # of uniforms: bits, th, ar, fl
    told: bool = True  # the temperature
    form: UniformConditioning = "one-hot"
    loss: Loss = "ce"
    window: int = 16  # queries of a group; the first drafts nothing
    recompute: bool = False  # in the backward pass: less memory, more time
    autocast: bool = False  # compute in bfloat16

    def __post_init__(self) -> None:
        assert self.gating and self.objective(1.0)  # made now, so that what they refuse is refused now
        if self.window < 2:
            raise ValueError("an adapter's window is 1, but a group's first query drafts nothing; take 2 or more")

    @property
    def gating(self) -> GatedLoraSettings:
        alpha = float(self.rank) if self.alpha is None else self.alpha
        return GatedLoraSettings(self.rank, alpha, self.dropout, self.targets, self.embedding, self.told, self.window)

    def objective(self, placement: float) -> Objective:
        return Objective(self.form, self.loss, self.window, placement)


@dataclass(frozen=True)
class HeadsSettings:
    """The joint law of the next tokens, from the target's last state."""

    circuit: Literal["ff", "cp", "hmm", "btree"] = "btree"
    window: int = 8  # positions of the joint law
    rank: int = 8  # states of each latent; ff has one
    directions: int = 16  # of the subspace that components differ in
    own: bool = False  # an unembedding of its own for every position and component; for small vocabularies
    told: bool = True  # the text's last token; else it is the window's first, and known
    contextual: bool = True  # do sums depend on the text?
    homogeneous: bool = False  # one table for all steps of a circuit?
    stay: float = 6.0  # logit by which a latent favours its parent's state before training; 0: none is favoured
    layers: int = 0  # of the target, the last ones, that heads read the text by once more, adapted
    lora: int = 16  # rank of what is adapted in these
    vocabulary: int = 8192  # tokens that are drafted: the most frequent

    def __post_init__(self) -> None:
        if self.vocabulary < 1:
            raise ValueError(f"heads' vocabulary is {self.vocabulary}, but must be 1 or more")
        assert self._shape(1)  # made now, so that what it refuses is refused now

    def _shape(self, hidden: int) -> HeadShape:
        own = {one.name for one in fields(self)}
        return HeadShape(hidden, **{one.name: getattr(self, one.name) for one in fields(HeadShape) if one.name in own})

    def shape(self, target: Any) -> HeadShape:
        """For this Hugging Face model. Errors: ValueError for more layers than it has."""
        config = target.config.get_text_config()
        if not 0 <= self.layers < config.num_hidden_layers:
            has = config.num_hidden_layers
            raise ValueError(f"heads adapt {self.layers} layers, but the model has {has}; take fewer")
        taps = (config.num_hidden_layers - self.layers,) if self.layers else ()
        return replace(self._shape(config.hidden_size), taps=taps)


@dataclass(frozen=True)
class JacobiForcingSettings:
    """Jacobi Forcing: of a gated LoRA, beside which the untouched model verifies, or of the model itself."""

    trains: Literal["adapter", "model"] = "adapter"
    rank: int = 16
    alpha: float | None = None  # of rank, where none is given
    targets: tuple[str, ...] = ()  # last names of linear layers; empty: all
    schedule: NoiseSchedule = "linear"  # linear, random, reverse, any
    mask: BlockMask = "noisy"  # noisy (NC), window (NC-IC), large, clean
    window: int = 8  # blocks in which the noise rises
    loss: Literal["kl", "ce"] = "kl"
    text_weight: float = 1.0  # of what keeps the model from drifting, where it is trained
    anchor: Literal["text", "laws"] = "text"  # that is the cross-entropy of its text, or the distance of its laws
    recompute: bool = False  # in the backward pass: less memory, more time
    autocast: bool = False  # compute in bfloat16

    def __post_init__(self) -> None:
        assert self.noise and GatedLoraSettings(
            self.rank, self._alpha
        )  # made now, so that what they refuse is refused now
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
        return BlockNoise(self.schedule, self.mask, self.window)


@dataclass(frozen=True)
class Recipe:
    """What is trained, for which model, on what, and how long."""

    kind: Literal["drafter", "adapter", "heads", "forcing"]
    schedule: Schedule
    about: str = ""
    time: str = ""  # that it takes, and where
    model: str = "smollm2-135m"
    dtype: str = "auto"  # that the target reads in
    temperatures: tuple[float, ...] = (0.7, 1.0)  # that are drafted for, besides 0
    teacher_texts: int = 0  # of the teacher's, evenly spread; 0: all
    lessons: WindowSettings = field(default_factory=WindowSettings)
    drafter: DrafterSettings = field(default_factory=DrafterSettings)
    adapter: AdapterSettings = field(default_factory=AdapterSettings)
    heads: HeadsSettings = field(default_factory=HeadsSettings)
    forcing: JacobiForcingSettings = field(default_factory=JacobiForcingSettings)

    def __post_init__(self) -> None:
        if self.kind in ("adapter", "forcing") and self.schedule.optimiser == "muon":
            raise ValueError(f"a recipe of kind {self.kind} has no matrices for muon; take the optimiser adamw")

    @property
    def settings(self) -> dict[str, Any]:
        """All that can change what comes out, as a file of settings holds it."""
        conditioning = asdict(self)
        for name in ("about", "time", *(kind for kind in METHODS if kind != self.kind)):
            del conditioning[name]
        return conditioning

    @property
    def method(self) -> str:
        """That drafts with what comes out."""
        return METHODS[self.kind]


def shipped_recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(file.stem for file in RECIPES_FOLDER.glob("*.toml"))


def find_recipe(name: str) -> Path:
    """The file of a recipe: a shipped one by its name, or one's own. Errors: ValueError."""
    if Path(name).suffix in (".toml", ".py"):
        if not Path(name).is_file():
            raise ValueError(
                f"there is no recipe {name}; check the path, or take one of {', '.join(shipped_recipes())}"
            )
        return Path(name)
    if name not in shipped_recipes():
        raise ValueError(
            f"unknown recipe {name!r}; {_suggestion(name, shipped_recipes())}; a file of yours ends in .toml or .py"
        )
    return RECIPES_FOLDER / f"{name}.toml"


def read_recipe(file: Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe with some settings changed: `rank=32`, `schedule.rate=1e-3`. Errors: ValueError."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not TOML ({error}); correct it") from None
    where = f"recipe {file.stem}"
    for change in overrides:
        _apply_override(table, change)
    recipe = _parse_dataclass(Recipe, table, where)
    if recipe.kind == "forcing" and (unused := sorted(set(table.get("lessons", {})) & WINDOW_ONLY_KEYS)):
        raise ValueError(f"{where}: training for Jacobi decoding has no {unused[0]}; leave it out")
    if recipe.kind == "adapter" and "laws" in table.get("lessons", {}):
        raise ValueError(f"{where}: an adapter learns laws by its loss; leave laws out and set loss=kl")
    for other in METHODS:
        if other != recipe.kind and other in table:
            raise ValueError(f"{where}: its kind is {recipe.kind}, which has no [{other}]; leave that out")
    return recipe


def _apply_override(table: dict[str, Any], override: str) -> None:
    """Put a change into a table, in the section that has such a key."""
    key, equals, value = override.partition("=")
    if not (equals and key):
        raise ValueError(f"--set {override}: write KEY=VALUE, such as lessons.texts=4")
    sections = {"", "lessons", "schedule", str(table.get("kind"))}
    known = [path for path in _setting_paths() if path.rpartition(".")[0] in sections and path not in NOT_SETTABLE]
    found = [path for path in known if key in (path, path.rpartition(".")[2])]
    if not found:
        near = difflib.get_close_matches(key, {*known, *(path.rpartition(".")[2] for path in known)}, n=1)
        offer = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise ValueError(f"--set {override}: a recipe has no setting {key}; {offer}")
    section, _, name = found[0].rpartition(".")
    (table.setdefault(section, {}) if section else table)[name] = _parse_toml_value(value)


def _parse_toml_value(text: str) -> Any:
    """As TOML writes it; what is none of its values is a text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _setting_paths() -> list[str]:
    """All settings, `section.key` within sections."""
    found, hints = [], typing.get_type_hints(Recipe)
    for each in fields(Recipe):
        inner = hints[each.name]
        found += [f"{each.name}.{one.name}" for one in fields(inner)] if is_dataclass(inner) else [each.name]
    return found


def _parse_dataclass(kind: type[Any], table: Mapping[str, Any], where: str) -> Any:
    """A dataclass from a table. Errors: ValueError for keys that it has not, lacks, or that are of another type."""
    hints, names = typing.get_type_hints(kind), [each.name for each in fields(kind)]
    if unknown := [key for key in table if key not in names]:
        raise ValueError(f"{where} has an unknown key {unknown[0]!r}; {_suggestion(unknown[0], names)}")
    needed = [each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING]
    if lacking := [name for name in needed if name not in table]:
        raise ValueError(f"{where} lacks {lacking[0]}; add it")
    given = {}
    for key, value in table.items():
        if not is_dataclass(hints[key]):
            given[key] = _parse_value(value, hints[key], f"{where.rstrip(',')}: {key}")
        elif isinstance(value, Mapping):
            given[key] = _parse_dataclass(hints[key], value, f"{where}, [{key}],")
        else:
            raise ValueError(f"{where}: {key} is a section; give its keys, such as {key}.{fields(hints[key])[0].name}")
    return kind(**given)


def _parse_value(value: Any, hint: Any, where: str) -> Any:
    """The value in the type of its field."""
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    if kind is Literal:
        if value in inner:
            return value
        raise ValueError(f"{where} is {value!r}, but must be one of {', '.join(inner)}")
    if kind is types.UnionType:  # X | None
        return _parse_value(value, inner[0], where)
    if kind is tuple and isinstance(value, list):
        return tuple(_parse_value(one, inner[0], where) for one in value)
    if hint is float and type(value) is int:
        return float(value)
    if kind is None and type(value) is hint:
        return value
    wanted = f"a list, each {_TYPE_NAMES[inner[0]]}" if kind is tuple else _TYPE_NAMES[hint]
    raise ValueError(f"{where} is {value!r}, but must be {wanted}")


_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _suggestion(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
