"""One file, or one folder, is one method: a frozen config whose `drafter` offers branches. Its name is the method's.

A trained method is a folder: its config and drafter are in `drafter.py`, beside its network, files and training.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import pkgutil
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

from saltus.core.noise import Noise
from saltus.core.protocols import Drafter, Network
from saltus.core.rules import Rule
from saltus.core.sampling import Sampling
from saltus.core.value_types import hints_of, short_repr, typed_value
from saltus.models.protocols import TargetNetwork

log = logging.getLogger("saltus")

AUTO = "auto"  # the default method; `saltus.engine.auto_method` says what it stands for with a model
NO_METHODS = ("shared", "published")  # folders of what methods use
PUBLISHED_DRAFTERS = ("dflash", "dspark", "eagle", "peagle")  # draft models of ptp, by what they are called
AUTO_METHODS = ("mtp", "ptp", "lookup", "assd")  # whose options may be given with it
WITH_DRAFT_MODEL = "small_model"  # the options of this one, too, where its draft model is named


@runtime_checkable
class Method(Protocol):
    """The frozen config of a method; its fields are options of the command line."""

    @property
    def draft_models(self) -> Mapping[str, str]:
        """Its draft models: the network name in its ForwardInputs → where the model is loaded from.

        Of a method that loads its network itself any words that say which network it is, options included that change
        it: where both are equal, the network is loaded once.
        """
        ...

    def drafter(self, noise: Noise, sampling: Sampling, rule: Rule) -> Drafter | None:
        """A drafter for one text, with its own state; None if the method drafts nothing."""
        ...


@runtime_checkable
class UsesTrainedModel(Protocol):
    """A method whose drafting depends on how its model was trained; the engine passes it the model's metadata."""

    @property
    def model(self) -> str:
        """The folder of the trained model."""
        ...

    def for_trained_model(self, kind: str, training: Mapping[str, Any]) -> Method:
        """The method for a model of this kind ("drafter", "adapter"), which was trained with these settings."""
        ...


@runtime_checkable
class LoadsNetwork(Protocol):
    """A method that loads its draft model itself, such as a drafter of its own kind that was trained for the target."""

    def load_network(self, target: TargetNetwork, target_name: str) -> Network:
        """The network that `draft_models` names, for this target. Errors: ValueError of one line.

        An engine calls it once for each name and value of `draft_models`.
        """
        ...


@lru_cache(maxsize=1)
def available_methods() -> dict[str, type[Any]]:
    """Every method by name: what this package holds, then the entry points of the group `saltus.methods`."""
    methods = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name not in NO_METHODS:
            camel = "".join(part.title() for part in module.name.split("_"))
            where = f"{__name__}.{module.name}{'.drafter' * module.ispkg}"
            methods[module.name] = getattr(import_module(where), camel)
    return dict(sorted((load_entry_points("saltus.methods") | methods).items()))


def load_entry_points(group: str) -> dict[str, Any]:
    """What other packages offer in a group, by name. What cannot be loaded is logged and left out."""
    found = {}
    for entry in entry_points(group=group):
        try:
            found[entry.name] = entry.load()
        except Exception as error:  # of any kind, in somebody else's code
            package = entry.dist.name if entry.dist else entry.module
            log.warning(
                "%s of the package %s is left out (%s: %s); repair that package, or uninstall it",
                entry.name, package, type(error).__name__, error,
            )  # fmt: skip
    return found


def method_names(spec: str, names_draft_model: bool = False) -> Sequence[str]:
    """The names of the methods of a spec like `jacobi+lookup`; for `auto` those whose options may be given.

    `names_draft_model`: a draft model is given, with which `auto` drafts. Errors: ValueError where `auto` is joined
    with other methods, or a method is named twice.
    """
    names = spec.split("+")
    if len(set(names)) < len(names):
        raise ValueError(f"{spec}: give each method once")
    if AUTO in names and len(names) > 1:
        raise ValueError(f"{spec}: {AUTO} chooses all methods itself; name the methods to join, such as ptp+lookup")
    if spec != AUTO:
        return names
    return (*AUTO_METHODS, WITH_DRAFT_MODEL) if names_draft_model else AUTO_METHODS


def make_methods(spec: str, options: Mapping[str, Mapping[str, Any]] | None = None) -> list[Method]:
    """The methods of a spec like `jacobi+lookup`; their drafts share one tree.

    For `auto` they are those whose options may be given, and `small_model` where its draft model is. `options` gives
    fields by method: {"lookup": {"max_ngram_size": 5}}.
    They may be of further methods, since an engine decodes with any, but all must be right. Errors: ValueError.
    """
    options = options or {}
    made = [_make_method(name, options.get(name, {})) for name in method_names(spec)]
    for name, fields in options.items():
        if name not in available_methods():
            raise ValueError(f"options are given for {name!r}, which is no method; there are {_listed()}")
        other = _make_method(name, fields)
        if spec == AUTO and name == WITH_DRAFT_MODEL and all(other.draft_models.values()):
            made.append(other)
    return made


def _make_method(name: str, fields: Mapping[str, Any]) -> Method:
    if name not in available_methods():
        known = [AUTO, *available_methods()]
        near = difflib.get_close_matches(name, known, n=2)
        if name.startswith(PUBLISHED_DRAFTERS):
            raise ValueError(f"{name!r} is a kind of draft model of the method ptp; take ptp with ptp.model=FOLDER")
        offer = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"unknown method {short_repr(name)}; {offer}there are {AUTO}, {_listed()}")
    if not isinstance(fields, Mapping):
        raise ValueError(f"the options of {name} are {fields!r}, but must be a dict of its fields")
    for key in fields:
        check_option(name, key)
    method = available_methods()[name]
    hints = hints_of(method)
    values = {key: typed_value(value, hints[key], f"{name}: {key}") for key, value in fields.items()}
    try:
        return method(**values)
    except TypeError as error:  # a field of a package's method has no default
        raise ValueError(f"method {name}: {error}; `saltus methods {name}` lists its options") from error


def check_option(name: str, key: str) -> None:
    """Errors: ValueError of one line if the method `name` has no option `key`."""
    keys = [each.name for each in dataclasses.fields(available_methods()[name]) if each.init]
    if key not in keys:
        near = difflib.get_close_matches(key, keys, n=1)
        offer = f"did you mean {name}.{near[0]}?" if near else f"it has {', '.join(keys) or 'no options'}"
        raise ValueError(f"{name} has no option {key}; {offer}")


def _listed() -> str:
    return ", ".join(available_methods())


def require_draft_models(methods: Sequence[Method]) -> None:
    """Errors: ValueError for a method that does not name what it drafts with."""
    for method, name in ((each, name) for each in methods for name, where in each.draft_models.items() if not where):
        if not hasattr(method, "model"):  # no option can cure it
            raise ValueError(
                f"{name}: draft_models of {type(method).__name__} is {dict(method.draft_models)}, but must name each"
                " network, in any words if load_network makes it from the target alone"
            )
        if name == WITH_DRAFT_MODEL:
            needs, cure = "a draft model", "give --draft-model NAME (draft_model=), or --option small_model.model=NAME"
        elif isinstance(method, LoadsNetwork):
            needs, cure = "a network that was trained for the model", f"give --option {name}.model=FOLDER"
        else:
            needs, cure = "a draft model", f"give --option {name}.model=NAME"
        raise ValueError(f"{name} needs {needs}; {cure}")
