"""The format of OLMo 3: calls as in Python, a line each, whose arguments are JSON, or texts in single quotes.

<function_calls>
look(animal='cat', number=2)
</function_calls>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saltus.engine.chat.tool_formats.argument_schemas import values_of, with_names
from saltus.engine.chat.tool_formats.json_calls import DECODER
from saltus.engine.chat.tool_formats.tool_format import (
    Function,
    Markers,
    Reading,
    ToolCall,
    ToolFormat,
    members_rules,
    one_of,
    read_section,
)

HEAD = re.compile(r"\s*([^\s(]+)\(\s*")
END = re.compile(r"\s*</function_calls>")
KEY = re.compile(r"(?!\))([^=\n]+)=\s*")
AFTER_VALUE = re.compile(r"\s*(,\s*)?")
QUOTED = r"""'([^'\\\n]|\\['"\\nrt])*'"""
ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "'": "\\'", "\\": "\\\\"}
UNESCAPED = {escape: text for text, escape in ESCAPES.items()}
BEGUN = re.compile(r"\s*[^\s(]*(\(.*)?", re.DOTALL)
ANY_TEXT = {"type", "title", "description", "default", "example", "examples"}  # keywords that restrict no text


@dataclass(frozen=True)
class Olmo(ToolFormat):
    """Calls with arguments by name between two tags."""

    begin: str = "<function_calls>"
    end: str = "</function_calls>"

    def rules(self, functions: Sequence[Function], several: bool, markers: Markers) -> list[str]:
        more = '("\\n" item)*' if several else ""
        rules = [
            one_of(functions, "item"),
            f'call: "\\n"? item {more} "\\n"? {markers(self.end)}',
            f"QUOTED: /{QUOTED}/",
            r"""KEY: /[^ \n=(),'"]+/""",
        ]
        for place, function in enumerate(functions):
            arguments, own = _argument_rules(f"item_{place}", function.schema)
            rules += [f'item_{place}: {json.dumps(function.name + "(")} {arguments} ")"', *own]
        return rules

    def write(self, calls: Sequence[ToolCall]) -> str:
        def written(value: Any) -> str:
            return _quoted(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

        lines = [
            f"{call.name}({', '.join(f'{key}={written(value)}' for key, value in json.loads(call.arguments).items())})"
            for call in calls
        ]
        return "\n".join([self.begin, *lines, self.end])

    def read(self, text: str, schemas: Mapping[str, Mapping[str, Any]], last: bool) -> Reading | None:
        return read_section(text, END, last, _next_call, lambda body: bool(BEGUN.fullmatch(body)))


def _argument_rules(rule: str, schema: Mapping[str, Any]) -> tuple[str, list[str]]:
    """What writes the arguments of a function, and the rules for it."""
    properties, required = schema.get("properties"), schema.get("required") or ()
    if not isinstance(properties, Mapping):
        return f'({rule}_any (", " {rule}_any)*)?', [f'{rule}_any: KEY "=" (QUOTED | %json {{}})']
    rules = [
        f"{rule}_{place}: {json.dumps(key + '=')} {_value(with_names(own, schema), own)}"
        for place, (key, own) in enumerate(properties.items())
    ]
    members = [(f"{rule}_{place}", key in required) for place, key in enumerate(properties)]
    arguments, more = members_rules(rule, members, ", ")
    return arguments, rules + more


def _value(schema: Mapping[str, Any], own: Any) -> str:
    """What writes an argument: JSON, or a text in single quotes where its schema does not restrict it, or lists it."""
    written = f"%json {json.dumps(schema)}"
    values = values_of(schema)
    if values.texts and not values.any_text:
        return f"({' | '.join([*(json.dumps(_quoted(text)) for text in values.texts), written])})"
    types = own.get("type", ()) if isinstance(own, Mapping) and own.keys() <= ANY_TEXT else ()
    return f"(QUOTED | {written})" if types == "string" or "string" in types else written


def _quoted(text: str) -> str:
    """A text in single quotes."""
    return f"'{text.translate(str.maketrans(ESCAPES))}'"


def _next_call(text: str, place: int) -> tuple[ToolCall, int] | None:
    """The call at a place, and where it ends; None if no whole one stands there."""
    if (head := HEAD.match(text, place)) is None:
        return None
    members, place = [], head.end()
    while (key := KEY.match(text, place)) is not None:
        if (value := _value_at(text, key.end())) is None:
            return None
        written, end = value
        members.append(f"{json.dumps(key[1], ensure_ascii=False)}: {written}")
        place = AFTER_VALUE.match(text, end).end()  # pyright: ignore[reportOptionalMemberAccess]: it matches anything
    return (ToolCall(head[1], f"{{{', '.join(members)}}}"), place + 1) if text.startswith(")", place) else None


def _value_at(text: str, place: int) -> tuple[str, int] | None:
    """The value at a place as JSON, as it is written, and where it ends; None if no whole one stands there."""
    if found := re.compile(QUOTED).match(text, place):
        plain = re.sub(r"\\.", lambda escape: UNESCAPED.get(escape[0], escape[0][1:]), found[0][1:-1])
        return json.dumps(plain, ensure_ascii=False), found.end()
    try:
        _, end = DECODER.raw_decode(text, place)
    except (ValueError, RecursionError):
        return None
    return text[place:end], end


OLMO = Olmo()
