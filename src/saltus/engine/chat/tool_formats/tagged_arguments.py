"""Write and read arguments that stand in tags of their own: texts as they are, without quotes, and the others as JSON.

So an argument's schema says what it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from saltus.engine.chat.tool_formats.argument_schemas import listed_values, type_of, types_of, values_of, with_names
from saltus.engine.chat.tool_formats.json_calls import refuse_constant
from saltus.engine.chat.tool_formats.tool_format import Markers

SPACE = re.compile(r"\s*")


class Written(NamedTuple):
    """An argument as it is written."""

    text: str
    is_json: bool | None = None  # None: its schema says it


@dataclass(frozen=True)
class ArgumentTags:
    """What stands around the name and the value of an argument."""

    before_name: str
    after_name: tuple[str, ...]  # parts that line breaks may separate
    end: str
    gap: str = ""  # behind an argument, in Lark's syntax
    kinds: tuple[str, str] = ("", "")  # behind `after_name`: before a text, and before JSON

    def rules(self, rule: str, schema: Mapping[str, Any], markers: Markers) -> tuple[str, list[str]]:
        """What writes the arguments of a function, in Lark's syntax, and the rules for it; `shared_rules` go with them.

        `schema` is that of the arguments, as `followed_schema` gives it. They stand in its order, and what is not
        required may be left out. Limits of texts are not followed, but for those of a list.
        """
        properties, required = schema.get("properties"), schema.get("required") or ()
        if not isinstance(properties, Mapping):
            return "other*", []
        rules, arguments = [], []
        for place, (key, own) in enumerate(properties.items()):
            arguments.append(f"{rule}_{place}" + ("" if key in required else "?"))
            head = f"{markers(self.before_name)} {json.dumps(key)} {self._after_name(markers)}"
            rules.append(f"{rule}_{place}: {head} {self._value(with_names(own, schema), markers)} {self.gap}")
        return " ".join(arguments), rules

    def shared_rules(self, markers: Markers) -> list[str]:
        """A text may be any up to the end of its argument, and so may the arguments of a function that names none."""
        name = f"{markers(self.before_name)} NAME {self._after_name(markers)}"
        return [
            'NAME: /[^<>"\\n]+/',
            markers.after_text("text", self.end),
            f"other: {name} {self._value({}, markers)} {self.gap}",
        ]

    def _after_name(self, markers: Markers) -> str:
        return ' "\\n"? '.join(map(markers, self.after_name))

    def _value(self, schema: Mapping[str, Any], markers: Markers) -> str:
        """The rule of an argument behind its first tag."""
        before_text, before_json = map(markers, self.kinds)
        values = values_of(schema)
        if values.any_text:
            values = values._replace(texts=[])
        ways = [f"{before_text} text"] if values.any_text else []
        if values.texts:
            ways.append(f"{before_text} ({' | '.join(map(json.dumps, values.texts))}) {markers(self.end)}")
        if values.others is not None and not (values.any_text and not before_text):  # that text may be any of them
            ways.append(f"{before_json} %json {json.dumps(values.others)} {markers(self.end)}")
        return ways[0] if len(ways) == 1 else f"({' | '.join(ways)})"

    def read(self, body: str, place: int) -> tuple[dict[str, Written], int] | None:
        """The arguments that begin at a place, as they are written, and where they end; None if one has no end."""
        arguments = {}
        while found := self._head.match(body, place):
            start, end = found.end(), self.end.strip()
            stop = body.find(self.end, start - 1)
            if stop < 0 and (stop := body.find(end, start)) < 0:
                return None
            is_json = None if self.kinds[0] == self.kinds[1] else found[2] == self.kinds[1]
            arguments[found[1].strip()] = Written(body[start:stop], is_json)
            place = SPACE.match(body, body.index(end, stop) + len(end)).end()  # pyright: ignore[reportOptionalMemberAccess]: it matches anything
        return arguments, place

    @property
    def _head(self) -> re.Pattern[str]:
        after = r"\s*".join(re.escape(part.strip()) for part in self.after_name)
        space = r"\n?" if self.after_name[-1].endswith("\n") else ""
        name = rf"[^{re.escape(self.after_name[0][0])}\n]+"
        return re.compile(
            f"{re.escape(self.before_name)}({name}){after}({'|'.join(map(re.escape, self.kinds))}){space}"
        )

    def write(self, arguments: str) -> str:
        """The arguments of a JSON object."""
        return "".join(
            f"{self.before_name}{key}{''.join(self.after_name)}{self.kinds[not isinstance(value, str)]}"
            f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}{self.end}"
            for key, value in json.loads(arguments).items()
        )


def arguments_as_json(arguments: Mapping[str, Written], schema: Mapping[str, Any]) -> str:
    """Arguments that are written without quotes as a JSON object, by their schema where nothing else has the type."""
    properties = schema.get("properties") or {}
    members = {key: _as_json(one, with_names(properties.get(key, {}), schema)) for key, one in arguments.items()}
    return "{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in members.items()) + "}"


def _as_json(written: Written, schema: Mapping[str, Any]) -> str:
    """An argument as JSON: as it is written if that is one of the values, or of the types, that its schema has besides
    texts, else a text.
    """
    text, is_json = written
    types = types_of(schema) if is_json is None else set() if is_json else {"string"}
    if types != {"string"}:
        try:
            value = json.loads(text, parse_constant=refuse_constant)
        except (ValueError, RecursionError):
            return json.dumps(text, ensure_ascii=False)
        listed = [] if is_json else listed_values(schema)
        if text in listed and not any(each == value and type_of(each) == type_of(value) for each in listed):
            return json.dumps(text, ensure_ascii=False)
        if type_of(value) in types - {"string"} or "string" not in types:
            return text.strip()
    return json.dumps(text, ensure_ascii=False)
