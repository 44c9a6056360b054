"""The format of GLM 4.5 to 4.7: a name, then tags for the name and the value of each argument.

    <tool_call>look
    <arg_key>animal</arg_key>
    <arg_value>cat</arg_value>
    </tool_call>

GLM 4.7 writes it without line breaks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saltus.engine.chat.tool_formats.tagged_arguments import ArgumentTags, arguments_as_json
from saltus.engine.chat.tool_formats.tool_format import (
    Function,
    Markers,
    Reading,
    ToolCall,
    ToolFormat,
    one_of,
    read_to_end,
)

LINE_BREAK = '"\\n"?'
ARGUMENTS = ArgumentTags("<arg_key>", ("</arg_key>", "<arg_value>"), "</arg_value>", LINE_BREAK)
HEAD = re.compile(r"\s*([^\s<]+)\s*(?=<|$)")
BEGUN = re.compile(r"\s*[^\s<]*(\s*(<.*)?)?", re.DOTALL)


@dataclass(frozen=True)
class Glm(ToolFormat):
    """A name and tagged arguments between two tags."""

    begin: str = "<tool_call>"
    end: str = "</tool_call>"
    between: str | None = LINE_BREAK
    quotes_texts: bool = False

    @property
    def markers(self) -> frozenset[str]:
        return frozenset({self.begin, self.end, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"})

    def is_shown_by(self, template: str) -> bool:
        return all(tag in template for tag in (self.begin, "<arg_key>", "<arg_value>"))

    def rules(self, functions: Sequence[Function], several: bool, markers: Markers) -> list[str]:
        rules = [one_of(functions), *ARGUMENTS.shared_rules(markers)]
        for place, function in enumerate(functions):
            arguments, more = ARGUMENTS.rules(f"call_{place}", function.schema, markers)
            rules += [f"call_{place}: {json.dumps(function.name)} {LINE_BREAK} {arguments} {markers(self.end)}", *more]
        return rules

    def write(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(f"{self.begin}{call.name}\n{ARGUMENTS.write(call.arguments)}{self.end}" for call in calls)

    def read(self, text: str, schemas: Mapping[str, Mapping[str, Any]], last: bool) -> Reading | None:
        def calls_of(body: str, cut_end: str) -> Sequence[ToolCall] | None:
            if (head := HEAD.match(body)) is None or (found := ARGUMENTS.read(body, head.end())) is None:
                return None
            arguments, place = found
            rest = body[place:].strip()
            if not cut_end.startswith(rest) or (cut_end and not rest):  # before its end a call may go on
                return None
            return [ToolCall(head[1], arguments_as_json(arguments, schemas.get(head[1], {})))]

        return read_to_end(text, self.end, last, calls_of, _breaks_off, lambda body: bool(BEGUN.fullmatch(body)))


def _breaks_off(body: str) -> bool:
    """True for a call whose last argument has no end."""
    head = HEAD.match(body)
    return head is not None and ARGUMENTS.read(body, head.end()) is None


GLM = Glm()
