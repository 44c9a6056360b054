"""Write the values of Gemma 4's calls, and make grammars of them from JSON schemas.

They are as JSON, but texts stand as they are between tokens of their own, keys without quotes, and nothing is spaced:
`{animal:<|"|>cat<|"|>,places:[1,2]}`. Keys are sorted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from saltus.engine.chat.tool_formats.argument_schemas import listed_here
from saltus.engine.chat.tool_formats.tool_format import Markers, members_rules
from saltus.engine.json_schemas import OPTIONS

QUOTE = '<|"|>'
SEPARATOR = ","
NUMBER_KEYS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
FOLLOWED = {
    "type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems", "enum", "const", "anyOf",
    "oneOf", "$ref", "$defs", "definitions", "title", "description", "default", "example", "examples", OPTIONS,
    *NUMBER_KEYS,
}  # fmt: skip
TYPES = ("string", "number", "boolean", "null", "object", "array")


class Number(str):
    """A number as it is written."""


def written_value(value: Any) -> str:
    """A value of JSON as calls have it."""
    if isinstance(value, Number):
        return value
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, Mapping):
        return f"{{{SEPARATOR.join(f'{key}:{written_value(value[key])}' for key in in_order(value))}}}"
    if isinstance(value, list):
        return f"[{SEPARATOR.join(map(written_value, value))}]"
    return json.dumps(value)


def written_arguments(arguments: str) -> str:
    """A JSON object as calls have it, with its numbers as they are."""
    return written_value(json.loads(arguments, parse_float=Number, parse_int=Number))


def in_order(keys: Mapping[str, Any]) -> list[str]:
    """Keys in the order of calls, which is that of Jinja's `dictsort`."""
    return sorted(keys, key=str.lower)


def keyword_not_followed(schema: Any) -> str:
    """A keyword of a schema, or of one in it, that `SchemaRules` ignores; empty if there is none."""
    if not isinstance(schema, Mapping):
        return ""
    inner = [
        schema.get("items"),
        schema.get("additionalProperties"),
        *schema.get("anyOf", ()),
        *schema.get("oneOf", ()),
    ]
    inner += [one for key in ("properties", "$defs", "definitions") for one in schema.get(key, {}).values()]
    ignored = next((key for key in schema if key not in FOLLOWED), "")
    return ignored or next(filter(None, map(keyword_not_followed, inner)), "")


class SchemaRules:
    """The rules of a grammar, in Lark's syntax, for the values of one schema."""

    def __init__(self, prefix: str, whole: Mapping[str, Any], markers: Markers) -> None:
        self.prefix, self.whole, self.markers = prefix, whole, markers
        self.rules: list[str] = []
        self.references: dict[str, str] = {}  # the rules of named schemas

    def value(self, schema: Any) -> str:
        """What writes a value of a schema of the whole one."""
        if not isinstance(schema, Mapping):
            return "any"
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]))
        if (values := listed_here(schema)) is not None:
            return self._one_of([self.markers(written_value(value)) for value in values])
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self._one_of(list(map(self.value, schema[key])))
        types = schema.get("type", "object" if "properties" in schema else "array" if "items" in schema else TYPES)
        if types is TYPES:
            return "any"
        return self._one_of([self._of_type(kind, schema) for kind in ([types] if isinstance(types, str) else types)])

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind in ("number", "integer"):
            limits = {key: schema[key] for key in (*NUMBER_KEYS, OPTIONS) if key in schema}
            return f"%json {json.dumps({**limits, 'type': kind, OPTIONS: self.whole.get(OPTIONS, {})})}"
        if kind == "object":
            return self.members(schema)
        if kind == "array":
            return self._items(schema)
        return {"string": "text", "boolean": '("true" | "false")', "null": '"null"'}[kind]

    def members(self, schema: Mapping[str, Any]) -> str:
        """What writes an object. What it names stands in the order of calls, and nothing else where it names any."""
        properties, required = schema.get("properties"), schema.get("required") or ()
        if not isinstance(properties, Mapping):
            others = schema.get("additionalProperties")
            member = f'KEY ":" {self.value(others)}'
            return '"{" "}"' if others is False else f'"{{" ({member} ("," {member})*)? "}}"'
        members = []
        for key in (key for key in in_order(properties) if properties[key] is not False):
            member = self._rule(f"{json.dumps(key + ':')} {self.value(properties[key])}")
            members.append((member, key in required))
        inner, rules = members_rules(self._name(), members, SEPARATOR)
        self.rules += rules
        return f'"{{" {inner} "}}"'

    def _items(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0 or schema.get("items") is False:
            return '"[" "]"'
        item = self._rule(self.value(schema.get("items")))
        items = f'{item} ("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _reference(self, name: str) -> str:
        """The rule of a named schema, which may refer to itself."""
        if name not in self.references:
            self.references[name] = rule = self._name()
            self.rules.append("")  # holds the place, since the schema may have rules of its own
            place, found = len(self.rules) - 1, self.whole
            for part in name.removeprefix("#").strip("/").split("/") if name != "#" else ():
                found = found.get(part, {}) if isinstance(found, Mapping) else {}
            self.rules[place] = f"{rule}: {self.value(found)}"
        return self.references[name]

    def _one_of(self, alternatives: list[str]) -> str:
        return alternatives[0] if len(alternatives) == 1 else f"({' | '.join(alternatives)})"

    def _rule(self, content: str) -> str:
        rule = self._name()
        self.rules.append(f"{rule}: {content}")
        return rule

    def _name(self) -> str:
        self.rules.append("")
        return f"{self.prefix}_{len(self.rules)}"


def shared_rules(markers: Markers) -> list[str]:
    """The rules for all schemas: any value, and texts."""
    return [
        markers.after_text("rest_of_text", QUOTE),
        f"text: {markers(QUOTE)} rest_of_text",
        r"KEY: /[^ \n:,{}\[\]<>]+/",
        'any: text | "true" | "false" | "null" | %json {"type": "number"} | any_list | any_object',
        'any_list: "[" (any ("," any)*)? "]"',
        'any_object: "{" (KEY ":" any ("," KEY ":" any)*)? "}"',
    ]
