"""The format of Qwen3-Coder, Qwen3.5 and Nemotron 3: a tag for the function, and one for each argument.

<tool_call>
<function=look>
<parameter=animal>
cat
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saltus.engine.chat.tool_formats.tagged_arguments import ArgumentTags, Written, arguments_as_json
from saltus.engine.chat.tool_formats.tool_format import (
    Function,
    Markers,
    Reading,
    ToolCall,
    ToolFormat,
    one_of,
    read_to_end,
)

BEGIN, END = "<function=", "</function>"
ARGUMENTS = ArgumentTags("<parameter=", (">\n",), "\n</parameter>\n")
HEAD = re.compile(rf"\s*{BEGIN}([^>\n]+)>\s*")
TAIL = re.compile(rf"{END}\s*")


@dataclass(frozen=True)
class Qwen3Coder(ToolFormat):
    """A tag with the function's name, and one with the name of each argument."""

    begin: str = "<tool_call>"
    end: str = "</tool_call>"
    between: str | None = '"\\n"'
    quotes_texts: bool = False

    @property
    def markers(self) -> frozenset[str]:
        return frozenset({self.begin, self.end, BEGIN, ARGUMENTS.before_name})

    def is_shown_by(self, template: str) -> bool:
        return all(tag in template for tag in (self.begin, BEGIN, ARGUMENTS.before_name))

    def rules(self, functions: Sequence[Function], several: bool, markers: Markers) -> list[str]:
        rules = [one_of(functions), *ARGUMENTS.shared_rules(markers)]
        for place, function in enumerate(functions):
            arguments, more = ARGUMENTS.rules(f"call_{place}", function.schema, markers)
            head = json.dumps(f"\n{BEGIN}{function.name}>\n")
            rules += [f'call_{place}: {head} {arguments} "{END}\\n" {markers(self.end)}', *more]
        return rules

    def write(self, calls: Sequence[ToolCall]) -> str:
        bodies = (f"{BEGIN}{call.name}>\n{ARGUMENTS.write(call.arguments)}{END}" for call in calls)
        return "\n".join(f"{self.begin}\n{body}\n{self.end}" for body in bodies)

    def read(self, text: str, schemas: Mapping[str, Mapping[str, Any]], last: bool) -> Reading | None:
        def calls_of(body: str, cut_end: str) -> Sequence[ToolCall] | None:
            whole, end, rest = body.rpartition(END)
            found = _parts(whole + end)
            if found is None or not cut_end.startswith(rest.strip()):
                return None
            return [ToolCall(found[0], arguments_as_json(found[1], schemas.get(found[0], {})))]

        def breaks_off(body: str) -> bool:
            return body.lstrip().startswith(BEGIN) and _parts(body) is None

        return read_to_end(text, self.end, last, calls_of, breaks_off, _may_begin_call)


def _may_begin_call(body: str) -> bool:
    return BEGIN.startswith(body.lstrip()) or body.lstrip().startswith(BEGIN)


def _parts(body: str) -> tuple[str, dict[str, Written]] | None:
    """The name of a call and its arguments as they are written; None if it is not whole."""
    if (head := HEAD.match(body)) is None or (found := ARGUMENTS.read(body, head.end())) is None:
        return None
    arguments, place = found
    return (head[1], arguments) if TAIL.fullmatch(body, place) else None


QWEN3_CODER = Qwen3Coder()
