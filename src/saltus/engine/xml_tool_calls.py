"""Calls of tools whose arguments stand in tags of their own, as Qwen3-Coder, Qwen3.5 and Nemotron 3 write them.

    <tool_call>
    <function=look>
    <parameter=animal>
    cat
    </parameter>
    </function>
    </tool_call>

A text stands as it is, without quotes; anything else is JSON. So an argument's schema says what it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from saltus.engine.json_schemas import OPTIONS

BEGIN, ARGUMENT, END = "<function=", "<parameter=", "</function>"
HEAD = re.compile(rf"\s*{BEGIN}([^>\n]+)>\s*")
HEAD_OF_ARGUMENT = re.compile(rf"{ARGUMENT}([^>\n]+)>\n?")
TAIL = re.compile(rf"{END}\s*")
SPACE = re.compile(r"\s*")
END_OF_ARGUMENT = "\n</parameter>\n"
LIMITS_OF_TEXTS = ("pattern", "format", "minLength", "maxLength")
# A text may be any up to the end of its argument, and so may the arguments of a function that names none.
RULES = (
    "ANY: /(.|\\n)*/",
    "NAME: /[^>\\n]+/",
    f"text[lazy]: ANY {json.dumps(END_OF_ARGUMENT)}",
    'other: "<parameter=" NAME ">\\n" text',
)


def call_rules(rule: str, name: str, schema: Mapping[str, Any], end: str) -> list[str]:
    """The rules, in Lark's syntax, of a call of this function that ends with `end`; RULES go with them.

    `schema` is that of its arguments, as `followed_schema` gives it. They stand in its order, and what is not required
    may be left out. Limits of texts are not followed, but for those of a list.
    """
    properties, required = schema.get("properties"), schema.get("required") or ()
    if not isinstance(properties, Mapping):
        return [f'{rule}: {json.dumps(f"{chr(10)}{BEGIN}{name}>{chr(10)}")} other* "{END}\\n" {end}']
    rules, arguments = [], []
    for place, (key, own) in enumerate(properties.items()):
        arguments.append(f"{rule}_{place}" + ("" if key in required else "?"))
        rules.append(f"{rule}_{place}: {json.dumps(f'<parameter={key}>{chr(10)}')} {_value(_with_names(own, schema))}")
    head = json.dumps(f"\n{BEGIN}{name}>\n")
    return [f'{rule}: {head} {" ".join(arguments)} "{END}\\n" {end}', *rules]


def texts_with_limits(schema: Mapping[str, Any]) -> dict[str, str]:
    """The arguments that are texts and have a limit that no grammar follows here, with its keyword."""
    return {
        key: limit
        for key, own in (schema.get("properties") or {}).items()
        if isinstance(own, Mapping) and takes_texts(_with_names(own, schema)) and not _listed(own)
        for limit in LIMITS_OF_TEXTS
        if limit in own
    }


def read_call(body: str, schema_of: Callable[[str], Mapping[str, Any]]) -> tuple[str, str] | None:
    """The name and the arguments, as JSON, of what stands between the tags of a call; None if it is no call.

    `schema_of` gives the schema of a function's arguments.
    """
    if (found := _parts(body)) is None:
        return None
    name, arguments = found
    schema = schema_of(name)
    properties = schema.get("properties") or {}
    members = {key: _as_json(text, _with_names(properties.get(key, {}), schema)) for key, text in arguments.items()}
    return name, "{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in members.items()) + "}"


def is_whole(body: str) -> bool:
    """True for what stands between the tags of a call."""
    return _parts(body) is not None


def _parts(body: str) -> tuple[str, dict[str, str]] | None:
    """The name of a call and its arguments as they are written; None if it is not whole."""
    if (head := HEAD.match(body)) is None:
        return None
    place, arguments = head.end(), {}
    while found := HEAD_OF_ARGUMENT.match(body, place):
        start = found.end()
        ends = (body.find(END_OF_ARGUMENT, start - 1), body.find("</parameter>", start))
        end = next((end for end in ends if end >= 0), None)
        if end is None:
            return None
        arguments[found[1]] = body[start:end]
        place = SPACE.match(body, body.index("</parameter>", end) + len("</parameter>")).end()  # pyright: ignore[reportOptionalMemberAccess]: it matches anything
    return (head[1], arguments) if TAIL.fullmatch(body, place) else None


def takes_texts(schema: Mapping[str, Any]) -> bool:
    """True if a string may be what a schema describes."""
    return "string" in _types(schema)


def _value(schema: Mapping[str, Any]) -> str:
    """The rule of an argument behind its first tag."""
    if (texts := _listed(schema)) is not None:
        return f"({' | '.join(map(json.dumps, texts))}) {json.dumps(END_OF_ARGUMENT)}"
    return "text" if takes_texts(schema) else f"%json {json.dumps(schema)} {json.dumps(END_OF_ARGUMENT)}"


def _listed(schema: Mapping[str, Any]) -> list[str] | None:
    """The texts of a schema that lists them; None for another one."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if values and all(isinstance(value, str) for value in values) else None


def _with_names(own: Any, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an argument with the options and the named schemas of the whole one."""
    shared = {key: schema[key] for key in (OPTIONS, "$defs", "definitions") if key in schema}
    return {**(own if isinstance(own, Mapping) else {}), **shared}


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
        return _types(_with_names(found, schema), depth + 1)
    for key in ("anyOf", "oneOf"):
        if key in schema and depth < 8:
            return set().union(*(_types(_with_names(each, schema), depth + 1) for each in schema[key]))
    return everything


def _type_of(value: Any) -> str:
    kinds = ((str, "string"), (bool, "boolean"), (int | float, "number"), (list, "array"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def _as_json(written: str, schema: Mapping[str, Any]) -> str:
    """An argument as JSON: as it is written if it is of a type that the schema has besides texts, else a text."""
    types = _types(schema)
    if types != {"string"}:
        try:
            if _type_of(json.loads(written, parse_constant=_refuse)) in types - {"string"} or "string" not in types:
                return written.strip()
        except (ValueError, RecursionError):
            pass
    return json.dumps(written, ensure_ascii=False)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
