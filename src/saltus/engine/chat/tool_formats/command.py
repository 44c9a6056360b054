"""The format of Command R7B and Command A: a JSON list of calls between two markers.

<|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "look", "parameters": {"animal": "cat"}}
]<|END_ACTION|>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saltus.engine.chat.tool_formats.json_calls import call_of, size_of_object
from saltus.engine.chat.tool_formats.tool_format import (
    Function,
    Markers,
    Reading,
    ToolCall,
    ToolFormat,
    one_of,
    read_section,
)

END = re.compile(r"\s*]\s*<\|END_ACTION\|>")
BEGUN = re.compile(r"\s*(\[\s*(\{.*)?)?", re.DOTALL)
BEFORE_OBJECT = re.compile(r"\s*[\[,]?\s*")


@dataclass(frozen=True)
class Command(ToolFormat):
    """A JSON list of objects of number, name and arguments."""

    begin: str = "<|START_ACTION|>"
    end: str = "<|END_ACTION|>"
    answer_markers: tuple[str, str] = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")

    def is_shown_by(self, template: str) -> bool:
        return super().is_shown_by(template) and '"tool_name"' in template

    def rules(self, functions: Sequence[Function], several: bool, markers: Markers) -> list[str]:
        more = '("," gap item)*' if several else ""
        rules = [
            one_of(functions, "item"),
            f'call: gap "[" gap item {more} gap "]" gap {markers(self.end)}',
            r"gap: /\n {0,4}| {1,4}/?",
            'number: ("\\"tool_call_id\\": \\"" /[0-9]+/ "\\", ")?',
        ]
        for place, function in enumerate(functions):
            head = json.dumps(f'"tool_name": {json.dumps(function.name)}, "parameters": ')
            rules.append(f'item_{place}: "{{" number {head} %json {json.dumps(function.schema)} "}}"')
        return rules

    def write(self, calls: Sequence[ToolCall]) -> str:
        objects = ",\n".join(
            f'    {{"tool_call_id": "{number}", "tool_name": {json.dumps(call.name)}, "parameters": {call.arguments}}}'
            for number, call in enumerate(calls)
        )
        return f"{self.begin}[\n{objects}\n]{self.end}"

    def read(self, text: str, schemas: Mapping[str, Mapping[str, Any]], last: bool) -> Reading | None:
        return read_section(text, END, last, _next_call, lambda body: bool(BEGUN.fullmatch(body)))


def _next_call(text: str, place: int) -> tuple[ToolCall, int] | None:
    """The call at a place, and where it ends; None if no whole one stands there."""
    place = BEFORE_OBJECT.match(text, place).end()  # pyright: ignore[reportOptionalMemberAccess]: it matches anything
    size = size_of_object(text[place:])
    call = None if size is None else call_of(text[place : place + size])
    return None if call is None or size is None else (call, place + size)


COMMAND = Command()
