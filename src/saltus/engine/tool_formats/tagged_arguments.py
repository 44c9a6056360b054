"""Write and read arguments that stand in tags of their own: texts as they are, without quotes, and the others as JSON.

So an argument's schema says what it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from saltus.engine.json_schemas import OPTIONS
from saltus.engine.tool_formats.json_calls import refuse_constant
from saltus.engine.tool_formats.tool_format import Markers

SPACE = re.compile(r"\s*")
LIMITS_OF_TEXTS = ("pattern", "format", "minLength", "maxLength")


class Written(NamedTuple):
    """An argument as it is written."""

    text: str
    is_json: bool | None = None  # None: its schema says it


@dataclass(frozen=True)
class ArgumentTags:
    """What stands around the name and the value of an argument."""

    before_name: str
    after_name: tuple[str, ...]  # parts that line breaks may separate
    end: str
    gap: str = ""  # behind an argument, in Lark's syntax
    kinds: tuple[str, str] = ("", "")  # behind `after_name`: before a text, and before JSON

    def rules(self, rule: str, schema: Mapping[str, Any], markers: Markers) -> tuple[str, list[str]]:
        """What writes the arguments of a function, in Lark's syntax, and the rules for it; `shared_rules` go with them.

        `schema` is that of the arguments, as `followed_schema` gives it. They stand in its order, and what is not
        required may be left out. Limits of texts are not followed, but for those of a list.
        """
        properties, required = schema.get("properties"), schema.get("required") or ()
        if not isinstance(properties, Mapping):
            return "other*", []
        rules, arguments = [], []
        for place, (key, own) in enumerate(properties.items()):
            arguments.append(f"{rule}_{place}" + ("" if key in required else "?"))
            head = f"{markers(self.before_name)} {json.dumps(key)} {self._after_name(markers)}"
            rules.append(f"{rule}_{place}: {head} {self._value(with_names(own, schema), markers)} {self.gap}")
        return " ".join(arguments), rules

    def shared_rules(self, markers: Markers) -> list[str]:
        """A text may be any up to the end of its argument, and so may the arguments of a function that names none."""
        name = f"{markers(self.before_name)} NAME {self._after_name(markers)}"
        return [
            'NAME: /[^<>"\\n]+/',
            markers.after_text("text", self.end),
            f"other: {name} {self._value({}, markers)} {self.gap}",
        ]

    def _after_name(self, markers: Markers) -> str:
        return ' "\\n"? '.join(map(markers, self.after_name))

    def _value(self, schema: Mapping[str, Any], markers: Markers) -> str:
        """The rule of an argument behind its first tag."""
        before_text, before_json = map(markers, self.kinds)
        if (texts := listed_texts(schema)) is not None:
            return f"{before_text} ({' | '.join(map(json.dumps, texts))}) {markers(self.end)}"
        written = f"{before_json} %json {json.dumps(schema)} {markers(self.end)}"
        if not takes_texts(schema):
            return written
        is_text = not before_text or _types(schema) == {"string"}
        return f"{before_text} text" if is_text else f"({before_text} text | {written})"

    def read(self, body: str, place: int) -> tuple[dict[str, Written], int] | None:
        """The arguments that begin at a place, as they are written, and where they end; None if one has no end."""
        arguments = {}
        while found := self._head.match(body, place):
            start, end = found.end(), self.end.strip()
            stop = body.find(self.end, start - 1)
            if stop < 0 and (stop := body.find(end, start)) < 0:
                return None
            is_json = None if self.kinds[0] == self.kinds[1] else found[2] == self.kinds[1]
            arguments[found[1].strip()] = Written(body[start:stop], is_json)
            place = SPACE.match(body, body.index(end, stop) + len(end)).end()  # pyright: ignore[reportOptionalMemberAccess]: it matches anything
        return arguments, place

    @property
    def _head(self) -> re.Pattern[str]:
        after = r"\s*".join(re.escape(part.strip()) for part in self.after_name)
        space = r"\n?" if self.after_name[-1].endswith("\n") else ""
        name = rf"[^{re.escape(self.after_name[0][0])}\n]+"
        return re.compile(
            f"{re.escape(self.before_name)}({name}){after}({'|'.join(map(re.escape, self.kinds))}){space}"
        )

    def write(self, arguments: str) -> str:
        """The arguments of a JSON object."""
        return "".join(
            f"{self.before_name}{key}{''.join(self.after_name)}{self.kinds[not isinstance(value, str)]}"
            f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}{self.end}"
            for key, value in json.loads(arguments).items()
        )


def arguments_as_json(arguments: Mapping[str, Written], schema: Mapping[str, Any]) -> str:
    """Arguments that are written without quotes as a JSON object, by their schema where nothing else has the type."""
    properties = schema.get("properties") or {}
    members = {key: _as_json(one, with_names(properties.get(key, {}), schema)) for key, one in arguments.items()}
    return "{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in members.items()) + "}"


def texts_with_limits(schema: Mapping[str, Any]) -> dict[str, str]:
    """The arguments that are texts and have a limit that no grammar follows here, with its keyword."""
    return {
        key: limit
        for key, own in (schema.get("properties") or {}).items()
        if isinstance(own, Mapping) and takes_texts(with_names(own, schema)) and not listed_texts(own)
        for limit in LIMITS_OF_TEXTS
        if limit in own
    }


def takes_texts(schema: Mapping[str, Any]) -> bool:
    """True if a string may be what a schema describes."""
    return "string" in _types(schema)


def with_names(own: Any, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an argument with the options and the named schemas of the whole one."""
    shared = {key: schema[key] for key in (OPTIONS, "$defs", "definitions") if key in schema}
    return {**(own if isinstance(own, Mapping) else {}), **shared}


def listed_texts(schema: Mapping[str, Any]) -> list[str] | None:
    """The texts of a schema that lists them; None for another one."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if values and all(isinstance(value, str) for value in values) else None


def _types(schema: Mapping[str, Any], depth: int = 0) -> set[str]:
    """JSON's types that a schema may describe; all of them where it does not say."""
    everything = {"string", "number", "boolean", "null", "object", "array"}
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return {"number" if name == "integer" else name for name in named}
    if "const" in schema or "enum" in schema:
        return {_type_of(value) for value in (schema.get("enum") or [schema.get("const")])}
    if (name := str(schema.get("$ref", ""))).startswith("#/") and depth < 8:
        found: Any = schema
        for part in name[2:].split("/"):
            found = found.get(part, {}) if isinstance(found, Mapping) else {}
        return _types(with_names(found, schema), depth + 1)
    for key in ("anyOf", "oneOf"):
        if key in schema and depth < 8:
            return set().union(*(_types(with_names(each, schema), depth + 1) for each in schema[key]))
    return everything


def _type_of(value: Any) -> str:
    kinds = ((str, "string"), (bool, "boolean"), (int | float, "number"), (list, "array"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def _as_json(written: Written, schema: Mapping[str, Any]) -> str:
    """An argument as JSON: as it is written if it is of a type that the schema has besides texts, else a text."""
    text, is_json = written
    types = _types(schema) if is_json is None else set() if is_json else {"string"}
    if types != {"string"}:
        try:
            value = json.loads(text, parse_constant=refuse_constant)
            if _type_of(value) in types - {"string"} or "string" not in types:
                return text.strip()
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)
