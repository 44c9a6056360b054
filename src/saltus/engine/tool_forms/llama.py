"""The form of Llama 3.1 and later: the whole text is a JSON object, `{"name": "look", "parameters": {}}`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saltus.engine.tool_forms.form import Function, Markers, Reading, ToolCall, one_of
from saltus.engine.tool_forms.hermes import HERMES
from saltus.engine.tool_forms.json_calls import call_of, may_begin_call, size_of_object, written_call


@dataclass(frozen=True)
class Llama:
    """A text that is one JSON object."""

    begin: str = ""
    between: None = None
    markers: frozenset[str] = frozenset()
    section: tuple[str, str] = ("", "")
    lead: tuple[str, str] = ("", "")
    quotes_texts: bool = True
    call_id: str = ""

    def is_shown_by(self, template: str) -> bool:
        return '"parameters"' in template and HERMES.begin not in template

    def rules(self, functions: Sequence[Function], several: bool, markers: Markers) -> list[str]:
        rules = [one_of(functions)]
        for place, function in enumerate(functions):
            head = f'{json.dumps({"name": function.name})[:-1]}, "parameters": '
            rules.append(f"call_{place}: {json.dumps(head)} %json {json.dumps(function.schema)} {json.dumps('}')}")
        return rules

    def write(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(written_call(call, "parameters") for call in calls)

    def read(self, text: str, schemas: Mapping[str, Mapping[str, Any]], last: bool) -> Reading | None:
        if not last:
            return None
        if (call := call_of(text)) is not None:
            return Reading(len(text), [call])
        is_cut_off = may_begin_call(text) and size_of_object(text) is None
        return Reading(len(text), () if is_cut_off else None)


LLAMA = Llama()
