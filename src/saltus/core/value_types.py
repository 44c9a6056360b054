"""Check values that a caller gives against type hints: settings of a text, fields of a method."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])

TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "none"}
MAX_SHOWN = 80  # characters of a wrong value
NUMBERS = {bool: (bool, np.bool_), int: (int, np.integer), float: (int, float, np.integer, np.floating)}


class SettingError(ValueError):
    """A setting that a caller gives is wrong; `setting` is its name."""

    def __init__(self, message: str, setting: str = "") -> None:
        super().__init__(message)
        self.setting = setting


@contextmanager
def about_setting(name: str) -> Iterator[None]:
    """While open, a ValueError is about the setting of this name, unless it names one itself."""
    try:
        yield
    except SettingError:
        raise
    except ValueError as error:
        raise SettingError(str(error), name) from error


def typed_value(value: Any, hint: Any, name: str) -> Any:
    """The value in this type: NumPy's numbers as Python's, lists as tuples, whole numbers as the floats they stand for.

    Where the hint is a protocol or names no class, any value passes. Errors: SettingError of one line.
    """
    try:
        found = _fitting(value, hint)
    except OverflowError:  # of a whole number that is no float
        found = _UNFIT
    if found is _UNFIT:
        raise SettingError(f"{name} is {short_repr(value)}, but must be {described(hint)}", name)
    return found


def typed_values(values: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """The values by name, each as `typed_value` returns it; one without a hint as it is. Errors: as there."""
    return {name: typed_value(value, hints[name], name) if name in hints else value for name, value in values.items()}


def require_at_least(settings: Any, prefix: str = "", **least: int) -> None:
    """Raise ValueError for the first field that is less than it may be; the message begins with the prefix."""
    for name, minimum in least.items():
        if getattr(settings, name) < minimum:
            raise ValueError(f"{prefix}{name} is {getattr(settings, name)}, but must be {minimum} or more")


def short_repr(value: Any) -> str:
    """A wrong value for an error message: its repr in one line, cut where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def with_checked_types(function: Function) -> Function:
    """The function with its keyword arguments checked by `typed_value`. Errors: ValueError of one line."""

    @wraps(function)
    def checked(*arguments: Any, **settings: Any) -> Any:
        return function(*arguments, **typed_values(settings, hints_of(function)))

    return cast(Function, checked)


@lru_cache
def hints_of(owner: Any) -> Mapping[str, Any]:
    """The type hints of a function's arguments, or of a class's fields."""
    return get_type_hints(owner)


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of `A | B`, or the only one."""
    return get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)


def described(hint: Any) -> str:
    """What a value of the type is, in words."""
    return " or ".join(map(_described, alternatives(hint)))


def _described(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if _is_pair(origin, inner):
        return f"({', '.join(map(described, inner))})"
    if origin in (tuple, Sequence):
        return f"a list, each {described(inner[0])}"
    if origin is Mapping:
        return "a dict with texts as keys" if inner[0] is str else "a dict"
    return TYPE_NAMES.get(hint) or f"a {getattr(hint, '__name__', hint)}"


_UNFIT = object()


def _fitting(value: Any, hint: Any) -> Any:
    """The value as one of the type, or `_UNFIT`."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        found = (_fitting(value, kind) for kind in inner)
        return next((each for each in found if each is not _UNFIT), _UNFIT)
    if origin is Literal:  # which of them it may be, says who reads it
        hint = type(inner[0])
    if hint in NUMBERS:
        fits = isinstance(value, NUMBERS[hint]) and (hint is bool or not isinstance(value, bool))
        return hint(value) if fits else _UNFIT
    if origin in (tuple, Sequence):
        return _fitting_list(value, inner, _is_pair(origin, inner))
    kind = Mapping if origin is Mapping else hint
    if kind is Mapping and isinstance(value, Mapping) and inner[:1] == (str,):
        return value if all(isinstance(key, str) for key in value) else _UNFIT
    is_class = isinstance(kind, type) and not getattr(kind, "_is_protocol", False)
    return value if not is_class or isinstance(value, kind) else _UNFIT


def _fitting_list(value: Any, inner: Sequence[Any], is_pair: bool) -> Any:
    """The items as a tuple, those of a set sorted; or `_UNFIT`."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | Set):
        return _UNFIT
    if is_pair and len(value) != len(inner):
        return _UNFIT
    items = [_fitting(item, inner[place if is_pair else 0]) for place, item in enumerate(value)]
    if any(item is _UNFIT for item in items):
        return _UNFIT
    return tuple(sorted(items) if isinstance(value, Set) else items)


def _is_pair(origin: Any, inner: Sequence[Any]) -> bool:
    """True for a tuple of a fixed length."""
    return origin is tuple and inner[-1:] != (Ellipsis,)
