"""The format of Mistral's models since 2025, as Devstral, Ministral 3 and Magistral: a name, then a JSON object.

    [TOOL_CALLS]look[ARGS]{"animal": "cat"}

A call ends with the object of its arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saltus.engine.chat.tool_formats.json_calls import size_of_object
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
class Mistral(ToolFormat):
    """A name between two markers, and a JSON object of the arguments."""

    begin: str = "[TOOL_CALLS]"
    after_name: str = "[ARGS]"
    between: str | None = ""

    @property
    def markers(self) -> frozenset[str]:
        return frozenset({self.begin, self.after_name})

    def is_shown_by(self, template: str) -> bool:
        return super().is_shown_by(template) and "[CALL_ID]" not in template

    def rules(self, functions: Sequence[Function], several: bool, markers: Markers) -> list[str]:
        return [one_of(functions)] + [
            f"call_{place}: {json.dumps(one.name)} {markers(self.after_name)} %json {json.dumps(one.schema)}"
            for place, one in enumerate(functions)
        ]

    def write(self, calls: Sequence[ToolCall]) -> str:
        return "".join(f"{self.begin}{call.name}{self.after_name}{call.arguments}" for call in calls)

    def new_scanner(self) -> ObjectScanner:
        return ObjectScanner()

    def read(self, text: str, schemas: Mapping[str, Mapping[str, Any]], last: bool) -> Reading | None:
        name, between, arguments = text.partition(self.after_name)
        if (size := size_of_object(arguments)) is not None:
            return Reading(len(text) - len(arguments) + size, [ToolCall(name.strip(), arguments[:size].strip())])
        if not last:
            return None
        is_cut_off = not between or "{".startswith(arguments.lstrip()[:1])
        return Reading(len(text), () if is_cut_off else None)


MISTRAL = Mistral()
