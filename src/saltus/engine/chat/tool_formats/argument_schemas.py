"""Read from an argument's schema which texts and which other values it may be: texts are written in another way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from saltus.engine.json_schemas import OPTIONS

LIMITS_OF_TEXTS = ("pattern", "format", "minLength", "maxLength")
SHARED = (OPTIONS, "$defs", "definitions")  # of the whole schema
TYPES = {"string", "number", "boolean", "null", "object", "array"}


class Values(NamedTuple):
    """What a schema admits."""

    any_text: bool
    texts: list[str]  # that it lists
    others: dict[str, Any] | None  # the schema of all that are no listed texts; None if there are none


def values_of(schema: Mapping[str, Any]) -> Values:
    """The texts that an argument may be, and the schema of its other values."""
    choices = list(_choices(schema))
    lists = [listed_here(one) for one in choices]
    texts = [value for values in lists for value in values or () if isinstance(value, str)]
    any_text = any(
        values is None and "string" in _types_of_one(one) for one, values in zip(choices, lists, strict=True)
    )
    if any_text or not texts:
        return Values(any_text, texts, dict(schema) if types_of(schema) != {"string"} else None)
    rest: list[dict[str, Any]] = []
    for one, values in zip(choices, lists, strict=True):
        if values is None:
            rest.append({key: value for key, value in one.items() if key not in SHARED})
        elif others := [value for value in values if not isinstance(value, str)]:
            rest.append({"enum": others})
    return Values(False, texts, with_names({"anyOf": rest}, schema) if rest else None)


def listed_here(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that one schema lists, of the types that it names; None if it lists none."""
    if not {"const", "enum"} & schema.keys():
        return None
    values = [schema["const"]] if "const" in schema else schema["enum"] or ()
    return [value for value in values if "type" not in schema or type_of(value) in _types_of_one(schema)] or None


def listed_values(schema: Mapping[str, Any]) -> list[Any]:
    """All values that a schema, or one of its alternatives, lists."""
    return [value for one in _choices(schema) for value in listed_here(one) or ()]


def texts_with_limits(schema: Mapping[str, Any]) -> dict[str, str]:
    """The arguments that are texts and have a limit that no grammar follows here, with its keyword."""
    return {
        key: limit
        for key, own in (schema.get("properties") or {}).items()
        if isinstance(own, Mapping) and values_of(with_names(own, schema)).any_text
        for limit in LIMITS_OF_TEXTS
        if limit in own
    }


def with_names(own: Any, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an argument with the options and the named schemas of the whole one."""
    shared = {key: schema[key] for key in SHARED if key in schema}
    return {**(own if isinstance(own, Mapping) else {}), **shared}


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """JSON's types that a schema may describe; all of them where it does not say."""
    return set().union(*map(_types_of_one, _choices(schema))) or TYPES


def type_of(value: Any) -> str:
    """The type of a value in JSON's words."""
    kinds = ((str, "string"), (bool, "boolean"), (int | float, "number"), (list, "array"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def _choices(schema: Mapping[str, Any], followed: set[str] | None = None) -> Iterator[Mapping[str, Any]]:
    """The schemas of which a value fits one, behind references and alternatives; each reference is followed once."""
    followed = set() if followed is None else followed
    if not {"type", "const", "enum"} & schema.keys():
        if (name := str(schema.get("$ref", ""))).startswith("#/"):
            if name not in followed:
                followed.add(name)
                found: Any = schema
                for part in name[2:].split("/"):
                    found = found.get(part, {}) if isinstance(found, Mapping) else {}
                yield from _choices(with_names(found, schema), followed)
            return
        for key in ("anyOf", "oneOf"):
            if key in schema:
                for each in schema[key]:
                    yield from _choices(with_names(each, schema), followed)
                return
    yield schema


def _types_of_one(schema: Mapping[str, Any]) -> set[str]:
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return {"number" if name == "integer" else name for name in named}
    if "const" in schema or "enum" in schema:
        return {type_of(value) for value in (schema.get("enum") or [schema.get("const")])}
    return TYPES
