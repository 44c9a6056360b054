"""The formats of DeepSeek V3, R1 and V3.1 and of Kimi K2: calls in a section, each between markers of its own.

    <｜tool▁calls▁begin｜>
    <｜tool▁call▁begin｜>look<｜tool▁sep｜>{"animal": "cat"}<｜tool▁call▁end｜>
    <｜tool▁calls▁end｜>

They are written without these line breaks.
Kimi K2 writes ids in the place of names (`functions.look:0`), DeepSeek V3 and R1 Markdown around the arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saltus.engine.chat.tool_formats.json_calls import is_within_string, size_of_object
from saltus.engine.chat.tool_formats.tool_format import (
    Function,
    Markers,
    Reading,
    ToolCall,
    ToolFormat,
    one_of,
    read_to_end,
)


@dataclass(frozen=True)
class CallSection(ToolFormat):
    """A name and a JSON object of the arguments, between markers."""

    begin: str
    before_name: str
    after_name: str
    end: str  # its last part is a marker
    shown: frozenset[str]  # all that a template has, but those of other formats
    section: tuple[str, str]
    not_shown: str = ""
    after_arguments: str = ""
    between: str | None = ""
    call_id: str = ""

    @property
    def markers(self) -> frozenset[str]:
        return self.shown

    def is_shown_by(self, template: str) -> bool:
        return super().is_shown_by(template) and not (self.not_shown and self.not_shown in template)

    def rules(self, functions: Sequence[Function], several: bool, markers: Markers) -> list[str]:
        rules = [one_of(functions)]
        for place, function in enumerate(functions):
            name = f"{markers(self.before_name)} {json.dumps(function.name)}"
            number = '":" /[0-9]+/' if self.call_id else ""
            arguments = f"{markers(self.after_name)} %json {json.dumps(function.schema)}"
            rules.append(f"call_{place}: {name} {number} {arguments} {markers(self.after_arguments + self.end)}")
        return rules

    def write(self, calls: Sequence[ToolCall]) -> str:
        written = []
        for number, call in enumerate(calls):
            name = self.call_id.format(name=call.name, number=number) if self.call_id else self.before_name + call.name
            arguments = f"{self.after_name}{call.arguments}{self.after_arguments}"
            written.append(f"{self.begin}{name}{arguments}{self.end}")
        return self.section[0] + (json.loads(self.between) if self.between else "").join(written) + self.section[1]

    def read(self, text: str, schemas: Mapping[str, Mapping[str, Any]], last: bool) -> Reading | None:
        return read_to_end(text, self.end, last, self._calls_of, self._breaks_off, self._may_begin_call)

    def _calls_of(self, body: str, cut_end: str) -> Sequence[ToolCall] | None:
        name, _, arguments = body.partition(self.after_name.strip())
        name, arguments = name.strip().removeprefix(self.before_name), arguments.lstrip()
        if (size := size_of_object(arguments)) is None or not name:
            return None
        if self.call_id:
            name = re.sub(r":\d+$", "", name)
        rest, tail = arguments[size:].strip(), self.after_arguments.strip()
        if not (tail + cut_end).startswith(rest) and rest not in ("", tail):
            return None
        return [ToolCall(name, arguments[:size].strip())]

    def _breaks_off(self, body: str) -> bool:
        return is_within_string(body.partition(self.after_name.strip())[2])

    def _may_begin_call(self, body: str) -> bool:
        _, after_name, arguments = body.partition(self.after_name.strip())
        return not after_name or "{".startswith(arguments.lstrip()[:1])


_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_V3_1 = CallSection(
    _CALL, "", _SEPARATOR, _CALL_END, frozenset({*_CALLS, _CALL, _SEPARATOR, _CALL_END}), _CALLS, not_shown="```json"
)
DEEPSEEK_V3 = CallSection(
    _CALL, f"function{_SEPARATOR}", "\n```json\n", _CALL_END, DEEPSEEK_V3_1.shown, _CALLS,
    after_arguments="\n```", between='"\\n"',
)  # fmt: skip
_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_BEGIN, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
KIMI_K2 = CallSection(
    _BEGIN, "functions.", _ARGUMENTS, _END, frozenset({*_SECTION, _BEGIN, _ARGUMENTS, _END}), _SECTION,
    call_id="functions.{name}:{number}",
)  # fmt: skip
