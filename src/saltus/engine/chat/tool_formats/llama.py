"""The format of Llama 3.1 and later: the whole text is a JSON object, `{"name": "look", "parameters": {}}`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saltus.engine.chat.tool_formats.hermes import HERMES
from saltus.engine.chat.tool_formats.json_calls import call_of, call_rule, may_begin_call, size_of_object, written_call
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
class Llama(ToolFormat):
    """A text that is one JSON object."""

    begin: str = ""

    @property
    def markers(self) -> frozenset[str]:
        return frozenset()

    def is_shown_by(self, template: str) -> bool:
        return '"parameters"' in template and HERMES.begin not in template

    def rules(self, functions: Sequence[Function], several: bool, markers: Markers) -> list[str]:
        return [one_of(functions)] + [
            f"call_{place}: {call_rule(one, 'parameters')}" for place, one in enumerate(functions)
        ]

    def write(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(written_call(call, "parameters") for call in calls)

    def new_scanner(self) -> ObjectScanner:
        return ObjectScanner()

    def read(self, text: str, schemas: Mapping[str, Mapping[str, Any]], last: bool) -> Reading | None:
        if not last:
            return None
        if (call := call_of(text)) is not None:
            return Reading(len(text), [call])
        is_cut_off = may_begin_call(text) and size_of_object(text) is None
        return Reading(len(text), () if is_cut_off else None)


LLAMA = Llama()
