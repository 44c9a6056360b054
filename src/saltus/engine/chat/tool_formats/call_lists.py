"""The formats of Granite 3, Phi-4-mini and Mistral's models before 2025: a marker, then a JSON list of calls.

<|tool_call|>[{"name": "look", "arguments": {"animal": "cat"}}]
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saltus.engine.chat.tool_formats.json_calls import call_of, call_rule, size_of_object, written_call
from saltus.engine.chat.tool_formats.tool_format import (
    Function,
    Markers,
    ObjectScanner,
    Reading,
    ToolCall,
    ToolFormat,
    one_of,
)


@dataclass(frozen=True)
class CallList(ToolFormat):
    """A JSON list of objects of name and arguments behind a marker."""

    begin: str
    shown: re.Pattern[str]  # what a template of this format has besides the marker
    bracket: str = "["  # of the list, if the marker does not have it

    @property
    def markers(self) -> frozenset[str]:
        return frozenset({self.begin})

    def is_shown_by(self, template: str) -> bool:
        return super().is_shown_by(template) and self.shown.search(template) is not None

    def rules(self, functions: Sequence[Function], several: bool, markers: Markers) -> list[str]:
        more = '(", " item)*' if several else ""
        items = [f"item_{place}: {call_rule(one)}" for place, one in enumerate(functions)]
        begin = '" "? "["' if self.bracket else ""
        return [one_of(functions, "item"), f'call: {begin} item {more} "]"', *items]

    def write(self, calls: Sequence[ToolCall]) -> str:
        return f"{self.begin}{self.bracket}{', '.join(map(written_call, calls))}]"

    def new_scanner(self) -> ObjectScanner:
        return ObjectScanner(0 if self.bracket else 1)

    def read(self, text: str, schemas: Mapping[str, Mapping[str, Any]], last: bool) -> Reading | None:
        calls, rest = [], text.lstrip()
        if rest and not rest.startswith(self.bracket):
            return Reading(len(text) - len(rest), None)
        is_whole, rest = False, rest.removeprefix(self.bracket).lstrip()
        while not is_whole and (size := size_of_object(rest)) is not None:
            calls.append(call_of(rest[:size]))
            rest = rest[size:].lstrip()
            is_whole = rest.startswith("]")
            rest = rest[1:] if is_whole else rest.removeprefix(",").lstrip()
        if not is_whole and not last:
            return None
        size = len(text) - len(rest) if is_whole else len(text)
        return Reading(size, None if None in calls else [call for call in calls if call is not None])


GRANITE_3 = CallList("<|tool_call|>", re.compile(r"<\|start_of_role\|>"))
MISTRAL_LISTS = CallList("[TOOL_CALLS]", re.compile(r"\[TOOL_CALLS\] ?\["))
PHI_4_MINI = CallList("functools[", re.compile(r"functools\["), bracket="")
