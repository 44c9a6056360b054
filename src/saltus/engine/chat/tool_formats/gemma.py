"""The format of Gemma 4: a name, and arguments as JSON, but for texts between tokens of their own and keys as they are.

<|tool_call>call:look{animal:<|"|>cat<|"|>,number:2}<tool_call|>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saltus.engine.chat.tool_formats.gemma_schemas import (
    QUOTE,
    SchemaRules,
    keyword_not_followed,
    shared_rules,
    written_arguments,
)
from saltus.engine.chat.tool_formats.json_calls import DECODER
from saltus.engine.chat.tool_formats.tool_format import (
    Function,
    Markers,
    Reading,
    ToolCall,
    ToolFormat,
    one_of,
    read_to_end,
)

KEY = re.compile(r"\s*([^:{}\[\],]+?)\s*:\s*")
PLAIN = re.compile(r"[^,{}\[\]\s]+")
SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class Gemma(ToolFormat):
    """A name and an object of arguments between two markers."""

    begin: str = "<|tool_call>call:"
    end: str = "<tool_call|>"
    between: str | None = ""

    @property
    def markers(self) -> frozenset[str]:
        return frozenset({"<|tool_call>", self.end, QUOTE})

    def is_shown_by(self, template: str) -> bool:
        return all(marker in template for marker in (self.begin, self.end, QUOTE))

    def not_followed(self, schema: Mapping[str, Any]) -> str:
        return keyword_not_followed(schema)

    def rules(self, functions: Sequence[Function], several: bool, markers: Markers) -> list[str]:
        rules = [one_of(functions), *shared_rules(markers)]
        for place, function in enumerate(functions):
            made = SchemaRules(f"call_{place}", function.schema, markers)
            arguments = made.members(function.schema)
            rules += [f"call_{place}: {json.dumps(function.name)} {arguments} {markers(self.end)}"]
            rules += [rule for rule in made.rules if rule]
        return rules

    def write(self, calls: Sequence[ToolCall]) -> str:
        return "".join(f"{self.begin}{call.name}{written_arguments(call.arguments)}{self.end}" for call in calls)

    def read(self, text: str, schemas: Mapping[str, Mapping[str, Any]], last: bool) -> Reading | None:
        return read_to_end(text, self.end, last, _calls_of, _breaks_off, _may_begin_call)


def _calls_of(body: str, cut_end: str) -> Sequence[ToolCall] | None:
    name, brace, _ = body.partition("{")
    try:
        arguments, end = _as_json(body, len(name))
    except (ValueError, RecursionError):
        return None
    if not brace or not name.strip() or not cut_end.startswith(body[end:].strip()):
        return None
    return [ToolCall(name.strip(), arguments)]


def _breaks_off(body: str) -> bool:
    return body.count(QUOTE) % 2 > 0


def _may_begin_call(body: str) -> bool:
    return bool(re.fullmatch(r"[^\s{<]*(\{.*)?", body, re.DOTALL))


def _as_json(text: str, place: int) -> tuple[str, int]:
    """The value at a place as JSON, and where it ends. Errors: ValueError if no whole one stands there."""
    if text.startswith(QUOTE, place):
        end = text.index(QUOTE, place + len(QUOTE))
        return json.dumps(text[place + len(QUOTE) : end], ensure_ascii=False), end + len(QUOTE)
    if text[place : place + 1] in ("{", "["):
        return _members_as_json(text, place)
    if (found := PLAIN.match(text, place)) is None:
        raise ValueError("there is no value")
    _, end = DECODER.raw_decode(found[0])
    if end < len(found[0]):
        raise ValueError("a value is not JSON")
    return found[0], found.end()


def _members_as_json(text: str, place: int) -> tuple[str, int]:
    """As `_as_json`, of an object or a list."""
    opening, members = text[place], []
    closing = "}" if opening == "{" else "]"
    place = _after_space(text, place + 1)
    while not text.startswith(closing, place):
        if members:
            place = _after_space(text, text.index(",", place, place + 1) + 1)
        key = ""
        if opening == "{":
            if (found := KEY.match(text, place)) is None:
                raise ValueError("a key is missing")
            key, place = f"{json.dumps(found[1], ensure_ascii=False)}: ", found.end()
        value, place = _as_json(text, place)
        members.append(key + value)
        place = _after_space(text, place)
    return f"{opening}{', '.join(members)}{closing}", place + 1


def _after_space(text: str, place: int) -> int:
    return SPACE.match(text, place).end()  # pyright: ignore[reportOptionalMemberAccess]: it matches anything


GEMMA_4 = Gemma()
