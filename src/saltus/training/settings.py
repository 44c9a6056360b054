"""The settings that all training runs have, as a recipe's TOML file holds them. The names of fields are its keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from saltus.core.picking import Coupling
from saltus.training.data.uniform_intervals import Truncation
from saltus.training.data.window_dataset import WindowSettings
from saltus.training.loop.training_loop import Schedule

RECIPE_COUPLING: Coupling = "probability"  # of recipes that name none


@dataclass(frozen=True)
class Recipe:
    """A training run: for which model, on what, and how long.

    The kind names its objective (`training.objectives`), and the table of the settings that it alone has.
    """

    kind: str
    settings: Any  # of the objective's `settings_type`
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
    teacher_texts: int = 0  # number of texts, chosen by the seed; 0: all
    data: WindowSettings = field(default_factory=WindowSettings)

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
        omitted = ["about", "time", "chat_template", "settings"]
        if self.coupling == RECIPE_COUPLING:  # jacobi recipes name none: that of the texts counts
            omitted.append("coupling")
        if not self.truncation:
            omitted += ["top_k", "top_p"]
        values = {name: value for name, value in asdict(self).items() if name not in omitted}
        return values | {self.kind: getattr(self.settings, "identity", None) or asdict(self.settings)}
