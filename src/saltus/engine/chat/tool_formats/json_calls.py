"""Read calls that are JSON, with their arguments as they are written: numbers keep their digits."""

from __future__ import annotations

import json
import re
from typing import Any

from saltus.engine.chat.tool_formats.tool_format import Function, ToolCall


def call_of(body: str, cut_end: str = "") -> ToolCall | None:
    """The call that a JSON object stands for. A part of `cut_end` may follow it."""
    try:
        members, end = object_members(body)
    except (ValueError, RecursionError):
        return None
    name, _ = members.get("name", members.get("tool_name", (None, "")))
    arguments, written = members.get("arguments", members.get("parameters", (None, "")))
    if not cut_end.startswith(body[end:].strip()) or not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(name, written)


def written_call(call: ToolCall, arguments: str = "arguments") -> str:
    """A call as a JSON object, with this key for its arguments."""
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "{arguments}": {call.arguments}}}'


def call_rule(function: Function, arguments: str = "arguments", space: str = "") -> str:
    """What writes a call as `written_call` does, with `space` around it, in Lark's syntax."""
    head = f'{space}{json.dumps({"name": function.name})[:-1]}, "{arguments}": '
    return f"{json.dumps(head)} %json {json.dumps(function.schema)} {json.dumps('}' + space)}"


def may_begin_call(body: str) -> bool:
    """True for what is left of an object that names a function first."""
    begin, body = '{"name"', body.lstrip()
    return begin.startswith(body) or body.startswith(begin)


def is_within_string(body: str) -> bool:
    """True for the beginning of JSON that breaks off within a string."""
    return re.sub(r"\\.", "", body).count('"') % 2 > 0


def size_of_object(text: str) -> int | None:
    """Where the JSON object ends that begins the text; None if it begins with none."""
    try:
        return object_members(text)[1]
    except (ValueError, RecursionError):
        return None


def object_members(text: str) -> tuple[dict[str, tuple[Any, str]], int]:
    """The members of the JSON object that a text begins with, each with its own text, and where the object ends.

    So numbers stay as they are written. Errors: ValueError if the text begins with no object.
    """
    space, members = re.compile(r"\s*"), {}

    def after(character: str, place: int) -> int:
        place = space.match(text, place).end()  # pyright: ignore[reportOptionalMemberAccess]: it matches anything
        if not text.startswith(character, place):
            raise ValueError(f"there is no {character!r}")
        return space.match(text, place + len(character)).end()  # pyright: ignore[reportOptionalMemberAccess]

    place = after("{", 0)
    while not text.startswith("}", place):
        key, place = DECODER.raw_decode(text, after(",", place) if members else place)
        if not isinstance(key, str):
            raise ValueError("a key is no string")
        begin = after(":", place)
        value, place = DECODER.raw_decode(text, begin)
        members[key] = value, text[begin:place]
        place = after("", place)
    return members, place + 1


def refuse_constant(name: str) -> Any:
    """What Python reads as JSON and JSON does not have. Errors: always ValueError."""
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=refuse_constant, parse_float=str, parse_int=str)
