"""Describe where checkpoints of one kind keep their heads: each part by the beginning of its tensors' names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from pkgutil import iter_modules


@dataclass(frozen=True)
class MtpFamily:
    """Beginnings of names; `{module}` stands for 0, 1, … and `{layer}` for the same after the target's last layer.

    A part without a number belongs to all modules. What begins like `layer` and like no other part is the layer's.
    A module computes norm(layer(projection [embedding_norm(e); state_norm(h)])), e being the embedding of a token and h
    the state before it, as the target's last norm or the module before gives it.
    """

    projection: str
    embedding_norm: str
    state_norm: str
    layer: str
    norm: str = ""  # empty: the target's own norm
    embeddings: str = ""  # empty: the target's; modules may have copies of these two
    head: str = ""
    state_first: bool = False  # the projection reads [state; embedding]
    # beginnings of what is called otherwise in the layer, by Transformers' names
    renamed: Mapping[str, str] = field(default_factory=dict)

    def parts(self, module: int, num_layers: int) -> dict[str, str]:
        """The beginning of the names of each part that a module may have."""
        names = ("projection", "embedding_norm", "state_norm", "norm", "embeddings", "head", "layer")
        given = {name: getattr(self, name) for name in names if getattr(self, name)}
        return {name: text.format(module=module, layer=num_layers + module) + "." for name, text in given.items()}

    def modules(self, names: Iterable[str], num_layers: int) -> list[dict[str, str]]:
        """For each module that has a tensor of its own: the names of all its tensors, by part and rest of the name."""
        known, modules = list(names), []
        while True:
            parts = self.parts(len(modules), num_layers)
            found = {placed: name for name in known if (placed := self._placed(name, parts)) is not None}
            numbered = {part for part in parts if "{" in getattr(self, part)}
            if not any(placed.partition(".")[0] in numbered or not modules for placed in found):
                return modules
            modules.append(found)

    def published(self, name: str, module: int, num_layers: int) -> str:
        """What a checkpoint calls a tensor, by its part and the rest of its name."""
        part, _, rest = name.partition(".")
        rest = _renamed(rest, self.renamed.items())
        return f"{self.parts(module, num_layers).get(part, part)}{rest}"

    def _placed(self, name: str, parts: Mapping[str, str]) -> str | None:
        """The part of a tensor and the rest of its name; the layer comes last, since others may begin like it."""
        for part, beginning in parts.items():
            if name.startswith(beginning):
                rest = name.removeprefix(beginning)
                return f"{part}.{_renamed(rest, ((theirs, ours) for ours, theirs in self.renamed.items()))}"
        return None


def _renamed(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    """With another beginning, if it has one of these."""
    found = ((old, new) for old, new in pairs if f"{name}.".startswith(f"{old}."))
    old, new = next(found, ("", ""))
    return new + name.removeprefix(old)


@lru_cache
def families() -> list[MtpFamily]:
    """Those of all files in `families`."""
    from saltus.methods.mtp import families as package

    return [import_module(f"{package.__name__}.{found.name}").FAMILY for found in iter_modules(package.__path__)]
