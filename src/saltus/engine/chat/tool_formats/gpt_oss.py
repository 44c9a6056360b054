"""The format of gpt-oss: a message to a function, in the channel for commentary.

    <|channel|>commentary to=functions.look <|constrain|>json<|message|>{"animal": "cat"}<|call|>

Reasoning stands before it in a message of its own, and an answer without calls is a message, too
(`engine.chat.channel_reader`). An answer ends with its first call.
"""

from __future__ import annotations

import json
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

MESSAGE, CALL_END, CONSTRAIN = "<|message|>", "<|call|>", "<|constrain|>"
NEXT = "<|start|>assistant"


@dataclass(frozen=True)
class GptOss(ToolFormat):
    """A message whose recipient is the function, and whose text a JSON object of the arguments."""

    recipient: str = "to=functions."
    begin: str = "<|channel|>commentary to=functions."
    end: str = CALL_END
    prefixes: tuple[str, str] = ("thought* preamble?", "final")

    @property
    def markers(self) -> frozenset[str]:
        return frozenset({self.recipient, "<|start|>", "<|channel|>", MESSAGE, "<|end|>", CONSTRAIN})

    def is_shown_by(self, template: str) -> bool:
        return all(text in template for text in ("<|channel|>commentary", "functions.", MESSAGE))

    def rules(self, functions: Sequence[Function], several: bool, markers: Markers) -> list[str]:
        rules = [
            one_of(functions),
            f"thought: {markers('<|channel|>analysis' + MESSAGE)} body",
            f"preamble: {markers('<|channel|>commentary' + MESSAGE)} body",
            f"final: {markers('<|channel|>final' + MESSAGE)}",
            markers.after_text("body", "<|end|>" + NEXT),
        ]
        kind = f'" "? ({markers(CONSTRAIN + "json")})? {markers(MESSAGE)}'
        for place, function in enumerate(functions):
            rules.append(f"call_{place}: {json.dumps(function.name)} {kind} %json {json.dumps(function.schema)}")
        return rules

    def write(self, calls: Sequence[ToolCall]) -> str:
        kind = f" {CONSTRAIN}json{MESSAGE}"
        return NEXT.join(f"{self.begin}{call.name}{kind}{call.arguments}{self.end}" for call in calls)

    def read(self, text: str, schemas: Mapping[str, Mapping[str, Any]], last: bool) -> Reading | None:
        return read_to_end(text, self.end, last, _calls_of, _breaks_off, _may_begin_call)


def _calls_of(body: str, cut_end: str) -> Sequence[ToolCall] | None:
    head, _, arguments = body.partition(MESSAGE)
    name, arguments = head.split(" ")[0].partition("<")[0], arguments.strip()
    size = size_of_object(arguments)
    if not name or size is None or not cut_end.startswith(arguments[size:].strip()):
        return None
    return [ToolCall(name, arguments[:size])]


def _breaks_off(body: str) -> bool:
    return is_within_string(body.partition(MESSAGE)[2])


def _may_begin_call(body: str) -> bool:
    _, message, arguments = body.partition(MESSAGE)
    return not message or "{".startswith(arguments.lstrip()[:1])


GPT_OSS = GptOss()
