"""Parsing of recipes: TOML files whose keys are the fields of `settings.Recipe` and of the settings of its kind.

The parser is our own, and `value_types` checks values as elsewhere: errors are one line with the cure. A schema library
such as pydantic would save few lines, since its errors had to be translated.
"""

from __future__ import annotations

import difflib
import sys
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal

from saltus import methods
from saltus.core.value_types import alternatives, typed_value
from saltus.training.objectives import OBJECTIVES
from saltus.training.settings import Recipe

NOT_SETTABLE = ("kind", "about", "time")  # they describe a recipe


def shipped_recipes() -> dict[str, Path]:
    """The recipes by name: those in the folder `recipes` beside every module of objectives, also of other packages."""
    names = {type(objective).__module__ for objective in OBJECTIVES.values()}
    own_last = sorted(names, key=lambda name: name.startswith(f"{methods.__name__}."))  # they win
    modules = [module for name in own_last if (module := sys.modules.get(name)) and getattr(module, "__file__", None)]
    found = {file.stem: file for module in modules for file in Path(str(module.__file__)).parent.glob("recipes/*.toml")}
    return dict(sorted(found.items()))


def find_recipe(name: str, offered: Sequence[str] | None = None) -> Path:
    """The file of a recipe: a shipped one by its name, or a path.

    Errors: ValueError, which names the recipes that are `offered`, by default all.
    """
    shipped = shipped_recipes()
    offered = list(shipped) if offered is None else offered
    if Path(name).suffix == ".toml":
        if not Path(name).is_file():
            others = f", or take one of {', '.join(offered)}" if offered else ""
            raise ValueError(f"there is no recipe {name}; check the path{others}")
        return Path(name)
    if name not in shipped:
        raise ValueError(f"unknown recipe {name!r}; {_suggestion(name, offered)}; a file of yours ends in .toml")
    return shipped[name]


def read_recipe(file: Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe, with overrides such as `rank=32` or `schedule.learning_rate=1e-3`. Errors: ValueError."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not TOML ({error}); correct it") from None
    where = f"recipe {file.stem}"
    kind = table.get("kind")
    if kind not in OBJECTIVES:
        is_given = f"its kind is {kind!r}, but must be one of" if "kind" in table else "it lacks kind; add one of"
        raise ValueError(f"{where}: {is_given} {', '.join(OBJECTIVES)}")
    objective = OBJECTIVES[kind]
    for override in overrides:
        _apply_override(table, override)
    for other in OBJECTIVES:
        if other != kind and other in table:
            raise ValueError(f"{where}: its kind is {kind}, which has no [{other}]; leave that out")
    settings = _parse_section(objective.settings_type, table.pop(kind, {}), kind, where)
    recipe = _parse_dataclass(partial(Recipe, settings=settings), _recipe_hints(), table, where)
    try:
        objective.validate(recipe, [*table, *table.get("data", {})])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return recipe


def overrides_without_effect(recipe: Recipe, overrides: Sequence[str]) -> list[str]:
    """A line for each override that changes nothing under the other settings."""
    reasons = OBJECTIVES[recipe.kind].without_effect(recipe)
    keys = [override.partition("=")[0].rpartition(".")[2] for override in overrides]
    return [
        f"--set {override} changes nothing here, since {reasons[key]}"
        for override, key in zip(overrides, keys, strict=True)
        if key in reasons
    ]


def _recipe_hints() -> dict[str, Any]:
    """The types of the keys that all recipes have."""
    return {name: hint for name, hint in typing.get_type_hints(Recipe).items() if name != "settings"}


def _apply_override(table: dict[str, Any], override: str) -> None:
    """Write an override into the table, in the section that has its key."""
    key, equals, value = override.partition("=")
    if not (equals and key):
        raise ValueError(f"--set {override}: write KEY=VALUE, such as data.batch_size=4")
    known = [path for path in _setting_paths(table["kind"]) if path not in NOT_SETTABLE]
    matching = [path for path in known if key in (path, path.rpartition(".")[2])]
    if not matching:
        offer = _suggestion(key, [*known, *(path.rpartition(".")[2] for path in known)], known)
        raise ValueError(f"--set {override}: a recipe has no setting {key}; {offer}")
    section, _, name = matching[0].rpartition(".")
    (table.setdefault(section, {}) if section else table)[name] = _parse_toml_value(value)


def _parse_toml_value(text: str) -> Any:
    """A TOML value; any other text is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _setting_paths(kind: str) -> list[str]:
    """The paths of all settings of a kind of recipe: `key`, or `section.key`."""
    paths = []
    for name, hint in [*_recipe_hints().items(), (kind, OBJECTIVES[kind].settings_type)]:
        paths += [f"{name}.{field.name}" for field in fields(hint)] if is_dataclass(hint) else [name]
    return paths


def _parse_section(kind: type[Any], table: Any, name: str, where: str) -> Any:
    """A section's dataclass. Errors: ValueError."""
    if not isinstance(table, Mapping):
        raise ValueError(f"{where}: {name} is a section; give its keys, such as {name}.{fields(kind)[0].name}")
    return _parse_dataclass(kind, typing.get_type_hints(kind), table, f"{where}, [{name}],")


def _parse_dataclass(make: Callable[..., Any], hints: Mapping[str, Any], table: Mapping[str, Any], where: str) -> Any:
    """A dataclass from a table. Errors: ValueError for an unknown or missing key, or a value of another type."""
    if unknown := [key for key in table if key not in hints]:
        raise ValueError(f"{where} has an unknown key {unknown[0]!r}; {_suggestion(unknown[0], list(hints))}")
    needed = [name for name, each in signature(make).parameters.items() if each.default is Parameter.empty]
    if missing := [name for name in needed if name in hints and name not in table]:
        raise ValueError(f"{where} lacks {missing[0]}; add it")
    values = {}
    for key, value in table.items():
        if is_dataclass(hints[key]):
            values[key] = _parse_section(hints[key], value, key, where)
        else:
            values[key] = _parse_value(value, hints[key], f"{where.rstrip(',')}: {key}")
    return make(**values)


def _parse_value(value: Any, hint: Any, where: str) -> Any:
    """The value in the type of its field. TOML has no none, so that of `X | None` is X."""
    hint = alternatives(hint)[0]
    if typing.get_origin(hint) is Literal and value not in (known := typing.get_args(hint)):
        raise ValueError(f"{where} is {value!r}, but must be one of {', '.join(known)}")
    return typed_value(value, hint, where)


def _suggestion(name: str, known: Sequence[str], listed: Sequence[str] = ()) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(listed or known) or 'none'}"
