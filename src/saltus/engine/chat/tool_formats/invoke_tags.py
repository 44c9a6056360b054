"""The formats of MiniMax M2 and DeepSeek V3.2: a section of calls, with a tag for each function and each argument.

    <minimax:tool_call>
    <invoke name="look">
    <parameter name="animal">cat</parameter>
    </invoke>
    </minimax:tool_call>

DeepSeek's tags begin with a token of their own, and say which arguments are texts:
`<｜DSML｜parameter name="animal" string="true">`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from saltus.engine.chat.tool_formats.tagged_arguments import ArgumentTags, arguments_as_json
from saltus.engine.chat.tool_formats.tool_format import (
    Function,
    Markers,
    Reading,
    ToolCall,
    ToolFormat,
    one_of,
    read_section,
)


@dataclass(frozen=True)
class InvokeTags(ToolFormat):
    """Tags with a name for each function and each argument, in a section."""

    begin: str
    end: str
    mark: str  # what all tags begin with
    own: frozenset[str]
    kinds: tuple[str, str] = ("", "")
    quotes_texts: bool = False

    @property
    def markers(self) -> frozenset[str]:
        return self.own

    def is_shown_by(self, template: str) -> bool:
        shown = (*self.own, self.begin.removeprefix(f"<{self.mark}"), 'invoke name="')
        return all(text in template for text in shown)

    def rules(self, functions: Sequence[Function], several: bool, markers: Markers) -> list[str]:
        more = '("\\n" item)*' if several else ""
        rules = [
            one_of(functions, "item"),
            f'call: "\\n" item {more} "\\n" {markers(self.end)}',
            *self.arguments.shared_rules(markers),
        ]
        for place, function in enumerate(functions):
            arguments, own = self.arguments.rules(f"item_{place}", function.schema, markers)
            begin, end = markers(f'{self._tag("invoke")}{function.name}">\n'), markers(self._end_of("invoke"))
            rules += [f'item_{place}: {begin} {arguments} "\\n"? {end}', *own]
        return rules

    def write(self, calls: Sequence[ToolCall]) -> str:
        head, end = self._tag("invoke"), self._end_of("invoke")
        written = [f'{head}{call.name}">\n{self.arguments.write(call.arguments)}{end}' for call in calls]
        return "\n".join([self.begin, *written, self.end])

    def read(self, text: str, schemas: Mapping[str, Mapping[str, Any]], last: bool) -> Reading | None:
        def next_call(text: str, place: int) -> tuple[ToolCall, int] | None:
            if (head := self._head.match(text, place)) is None:
                return None
            found, end = self.arguments.read(text, head.end()), self._end_of("invoke")
            if found is None or not text.startswith(end, found[1]):
                return None
            arguments = arguments_as_json(found[0], schemas.get(head[1], {}))
            return ToolCall(head[1], arguments), found[1] + len(end)

        return read_section(text, self._closing, last, next_call, self._may_begin_call)

    @cached_property
    def arguments(self) -> ArgumentTags:
        """What stands around arguments."""
        after = '" string="' if any(self.kinds) else '">'
        return ArgumentTags(self._tag("parameter"), (after,), f"{self._end_of('parameter')}\n", kinds=self.kinds)

    @cached_property
    def _head(self) -> re.Pattern[str]:
        return re.compile(rf'\s*{re.escape(self._tag("invoke"))}([^"\n]+)">\s*')

    @cached_property
    def _closing(self) -> re.Pattern[str]:
        return re.compile(rf"\s*{re.escape(self.end)}")

    def _tag(self, name: str) -> str:
        return f'<{self.mark}{name} name="'

    def _end_of(self, name: str) -> str:
        return f"</{self.mark}{name}>"

    def _may_begin_call(self, body: str) -> bool:
        body, head = body.lstrip(), self._tag("invoke")
        return head.startswith(body) or body.startswith(head)


_CALLS = ("<minimax:tool_call>", "</minimax:tool_call>")
MINIMAX_M2 = InvokeTags(*_CALLS, mark="", own=frozenset(_CALLS))
_MARK = "｜DSML｜"
DEEPSEEK_V3_2 = InvokeTags(
    f"<{_MARK}function_calls>", f"</{_MARK}function_calls>", _MARK, frozenset({_MARK}), ('true">', 'false">')
)
