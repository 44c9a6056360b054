"""Say what a format of tool calls is: how a template shows it, how a grammar writes it, and how it is read."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True)
class ToolCall:
    """A call in a text."""

    name: str
    arguments: str  # a JSON object, as the model wrote it


@dataclass(frozen=True)
class Function:
    """What may be called."""

    name: str
    schema: Mapping[str, Any]  # of the arguments, as `followed_schema` gives it


@dataclass(frozen=True)
class Markers:
    """How a grammar writes the markers of calls: special tokens by number, others as texts."""

    tokens: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, text: str) -> str:
        """A text in Lark's syntax, with the markers in it as tokens."""
        parts = self._parts(text)
        return " ".join(f"<[{self.tokens[part]}]>" if part in self.tokens else json.dumps(part) for part in parts)

    def after_text(self, rule: str, text: str) -> str:
        """The rule of any text (`TEXT`) up to the first place of this one. No text has a token that is a marker."""
        parts = self._parts(text)
        place = next((place for place, part in enumerate(parts) if part in self.tokens), None)
        if place is None:
            return f"{rule}[lazy]: TEXT {self(text)}"
        before = "".join(parts[:place])
        any_text = f"/(.|\\n)*{re.escape(before).replace('/', chr(92) + '/')}/" if before else "TEXT"
        return f"{rule}: {any_text} {self(''.join(parts[place:]))}"

    def _parts(self, text: str) -> list[str]:
        """The text, cut before and after each marker that is a token."""
        if not self.tokens:
            return [text] if text else []
        return [part for part in re.split(f"({'|'.join(map(re.escape, self.tokens))})", text) if part]


class Reading(NamedTuple):
    """What stands behind the begin of a call."""

    size: int  # characters that are read
    calls: Sequence[ToolCall] | None  # None: they are text; empty: what is left of a call that is cut off


SIGNIFICANT = re.compile(r'[\\"{}\[\]]')


class ObjectScanner:
    """Finds the end of the first JSON object or list in a text that arrives in pieces, each of which is read once."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth  # of objects and lists; those that have begun before the text count
        self.in_string = self.is_escaped = self.has_ended = False

    def read(self, text: str) -> bool:
        """True if the object ends in this piece."""
        place = int(self.is_escaped)
        self.is_escaped = self.is_escaped and not text
        while not self.has_ended and (found := SIGNIFICANT.search(text, place)) is not None:
            mark, place = found[0], found.end()
            if mark == "\\":
                self.is_escaped = self.in_string and place == len(text)
                place += self.in_string
            elif mark == '"':
                self.in_string = not self.in_string and self.depth > 0
            elif not self.in_string and mark in "{[":
                self.depth += 1
            elif not self.in_string and self.depth:
                self.depth -= 1
                self.has_ended = not self.depth
                if self.has_ended:
                    return True
        return False


class MarkerScanner:
    """Finds a marker in a text that arrives in pieces, each of which is read once."""

    def __init__(self, marker: str) -> None:
        self.marker, self.tail = marker, ""

    def read(self, text: str) -> bool:
        """True if the marker ends in this piece."""
        text = self.tail + text
        self.tail = text[max(len(text) - len(self.marker) + 1, 0) :]
        return self.marker in text


class ToolFormat(ABC):
    """How a model writes its calls. What is set here holds for most."""

    begin: str  # what a call begins with; empty if the whole text is the call
    end: str  # what a call, or what holds several, ends with
    # what stands between a call and the begin of the next, in Lark's syntax; None if `call` holds several
    between: str | None = None
    section: tuple[str, str] = ("", "")  # what stands before the first call and behind the last one
    # what may stand before calls, and before an answer without them, in Lark's syntax; empty if calls stand in the text
    prefixes: tuple[str, str] = ("", "")
    answer_markers: tuple[str, str] = ("", "")  # what may stand around an answer without calls, if they are tokens
    quotes_texts: bool = True  # arguments that are texts are JSON, so that a grammar follows their limits
    call_id: str = ""  # as `str.format` writes it of a call's `name` and `number`; empty if any will do

    @property
    def markers(self) -> frozenset[str]:
        """Texts that belong to this format alone, in a template and in a call. They may be special tokens."""
        return frozenset({self.begin, self.end})

    def is_shown_by(self, template: str) -> bool:
        """True for a chat template whose calls are of this format: for most, one that has all its markers."""
        return all(marker in template for marker in self.markers)

    @abstractmethod
    def rules(self, functions: Sequence[Function], several: bool, markers: Markers) -> list[str]:
        """The rules, in Lark's syntax, of a `call` behind its begin."""

    @abstractmethod
    def write(self, calls: Sequence[ToolCall]) -> str:
        """Calls as a model writes them."""

    def not_followed(self, schema: Mapping[str, Any]) -> str:
        """A keyword of the arguments' schema that `rules` ignores, besides limits of texts; empty if there is none."""
        return ""

    def new_scanner(self) -> MarkerScanner | ObjectScanner:
        """What says in which pieces of a text a call may end: those with its `end`, if it has one."""
        return MarkerScanner(self.end)

    @abstractmethod
    def read(self, text: str, schemas: Mapping[str, Mapping[str, Any]], last: bool) -> Reading | None:
        """Read what stands behind the begin of a call; None if more of it has to arrive. After the `last` nothing does.

        `schemas` are those of the functions' arguments, by name.
        """


def read_to_end(
    text: str,
    end: str,
    last: bool,
    calls_of: Callable[[str, str], Sequence[ToolCall] | None],
    breaks_off: Callable[[str], bool],
    may_begin: Callable[[str], bool],
) -> Reading | None:
    """Read a call up to the first `end` outside its arguments, before which `breaks_off` is not true of it.

    `calls_of` gives the calls in a body, behind which a part of its second argument may stand. A text without an end is
    a call that is cut off if it `may_begin` one.
    """
    place = text.find(end)
    while place >= 0 and breaks_off(text[:place]):
        place = text.find(end, place + 1)
    if place < 0:
        if not last:
            return None
        calls = calls_of(text, end)
        return Reading(len(text), () if calls is None and may_begin(text) else calls)
    return Reading(place + len(end), calls_of(text[:place], ""))


def read_section(
    text: str,
    end: re.Pattern[str],
    last: bool,
    next_call: Callable[[str, int], tuple[ToolCall, int] | None],
    may_begin: Callable[[str], bool],
) -> Reading | None:
    """Read calls up to the `end` of their section.

    `next_call` gives the call at a place and where it ends; None if no whole one stands there. A text without calls and
    end is a call that is cut off if it `may_begin` one.
    """
    calls, place = [], 0
    while (found := next_call(text, place)) is not None:
        call, place = found
        calls.append(call)
    if calls and (closing := end.match(text, place)) is not None:
        return Reading(closing.end(), calls)
    if not last:
        return None
    return Reading(len(text), calls if calls or may_begin(text) else None)


def one_of(functions: Sequence[Function], rule: str = "call") -> str:
    """The rule of a call of any of the functions: `call_0` is that of the first."""
    return f"{rule}: " + " | ".join(f"{rule}_{place}" for place in range(len(functions)))


def members_rules(rule: str, members: Sequence[tuple[str, bool]], separator: str) -> tuple[str, list[str]]:
    """What writes members in their order, with a separator between two, in Lark's syntax, and the rules for it.

    A member is what writes it, and whether it is required.
    """
    rules, starts = [], []
    for place, (member, required) in reversed(list(enumerate(members))):
        more = f"{rule}_from_{place + 1}" if place + 1 < len(members) else ""
        rules.append(f"{rule}_from_{place}: ({json.dumps(separator)} {member}){'' if required else '?'} {more}")
        starts = [f"{member} {more}"] if required else [f"{member} {more}", *starts]
    written = f"({' | '.join(starts)})" if starts else ""
    return written + ("" if any(required for _, required in members) else "?" * bool(starts)), rules[:-1]


def overlap(text: str, marker: str) -> int:
    """How much of a marker stands at the end of a text."""
    return next((size for size in range(len(marker) - 1, 0, -1) if text.endswith(marker[:size])), 0)
