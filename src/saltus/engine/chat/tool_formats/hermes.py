"""Hermes's format, also that of Qwen 2.5 and 3 and Granite 4: a JSON object between tags.

    <tool_call>
    {"name": "look", "arguments": {"animal": "cat"}}
    </tool_call>

It is the format of models whose templates show none. Phi-4-mini's tags are others, in one of its templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saltus.engine.chat.tool_formats.json_calls import (
    call_of,
    call_rule,
    is_within_string,
    may_begin_call,
    written_call,
)
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
class Hermes(ToolFormat):
    """A JSON object of name and arguments between two tags."""

    begin: str = "<tool_call>"
    end: str = "</tool_call>"
    between: str | None = '"\\n"'
    space: str = "\n"  # around the object

    def rules(self, functions: Sequence[Function], several: bool, markers: Markers) -> list[str]:
        end = markers(self.end)
        calls = [f"call_{place}: {call_rule(one, space=self.space)} {end}" for place, one in enumerate(functions)]
        return [one_of(functions), *calls]

    def write(self, calls: Sequence[ToolCall]) -> str:
        between = json.loads(self.between or '""')
        return between.join(f"{self.begin}{self.space}{written_call(call)}{self.space}{self.end}" for call in calls)

    def read(self, text: str, schemas: Mapping[str, Mapping[str, Any]], last: bool) -> Reading | None:
        return read_to_end(text, self.end, last, _calls_of, is_within_string, may_begin_call)


def _calls_of(body: str, cut_end: str) -> Sequence[ToolCall] | None:
    call = call_of(body, cut_end)
    return None if call is None else [call]


HERMES = Hermes()
PHI_4_TAGS = Hermes("<|tool_call|>", "<|/tool_call|>", between="", space="")
