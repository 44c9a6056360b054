"""Translate llama.cpp's grammars (GBNF) to Lark's syntax as llguidance reads it, one character at a time.

A terminal of Lark's takes as many characters as it can: after a terminal `word` of letters no "s" could follow.
Rules of GBNF have no such preference, so each character is a terminal of its own here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_DEPTH = 64  # of groups in each other
LAST_CHARACTER = 0x10FFFF
SURROGATES = range(0xD800, 0xE000)  # that are no characters
ANY = f"/[\\x{{0}}-\\x{{{LAST_CHARACTER:X}}}]/"
NOTHING = '""'

TOKEN = re.compile(
    r"""(?P<blank>[ \t]+|\#[^\r\n]*)
    |(?P<line>[\r\n])
    |(?P<name>[A-Za-z0-9_-]+)
    |(?P<literal>"(?:[^"\\]|\\.)*")
    |(?P<class>\[(?:[^]\\]|\\.)*\])
    |(?P<repetition>[*+?]|\{\s*(?P<least>[0-9]+)\s*(?P<comma>,)?\s*(?P<most>[0-9]*)\s*\})
    |(?P<sign>::=|[().|])""",
    re.VERBOSE | re.DOTALL,
)
CHARACTER = re.compile(
    r"""\\(?:x(?P<x>[0-9A-Fa-f]{2})|u(?P<u>[0-9A-Fa-f]{4})|U(?P<U>[0-9A-Fa-f]{8})|(?P<named>[nrt"\\\[\]]))
    |(?P<itself>[^\\])""",
    re.VERBOSE | re.DOTALL,
)
NAMED = {"n": "\n", "r": "\r", "t": "\t"}


@dataclass
class _Group:
    """Alternatives so far; each is a list of items in Lark's syntax."""

    alternatives: list[list[str]] = field(default_factory=lambda: [[]])
    repeated: bool = False  # the last item

    def add(self, item: str) -> None:
        self.alternatives[-1].append(item)
        self.repeated = False

    def written(self) -> str:
        return " | ".join(" ".join(items) or NOTHING for items in self.alternatives)


def gbnf_to_lark(grammar: str) -> str:
    """The grammar in Lark's syntax. Errors: ValueError of one line."""
    rules: dict[str, str] = {}
    names = _Names()
    name, groups, line, awaits_more = "", [], 1, False
    for kind, token in _tokens(grammar):
        text, place = token[0], f"line {line}"
        line += text.count("\n")
        if kind == "line" and len(groups) == 1 and not awaits_more:  # outside of parentheses a rule ends
            rules[name], name, groups = groups[0].written(), "", []
        if kind in ("blank", "line"):
            continue
        if groups:
            _add(groups, kind, token, place, names)
            awaits_more = text == "|"
        elif kind == "name" and not name:
            name = text
        elif text == "::=" and name:
            groups, awaits_more = [_Group()], True
        else:
            raise ValueError(f"{place}: {text[:20]!r} stands where a rule (name ::= …) has to begin")
    if len(groups) > 1 or (name and not groups):
        raise ValueError(f"the rule {name[:50]!r} is not complete at the end")
    if groups:
        rules[name] = groups[0].written()
    if "root" not in rules:
        raise ValueError("no rule is called root, where a text begins")
    if missing := next((used for used in names.places if used not in rules), None):
        raise ValueError(f"{names.places[missing]}: there is no rule {missing[:50]!r}")
    written = [f"{names.in_lark(name)}: {body}" for name, body in rules.items()]
    return "\n".join(["%llguidance {}", f"start: {names.in_lark('root')}", *written])


@dataclass
class _Names:
    """The names of rules: Lark's tell terminals by their letters, so rules have numbers there."""

    numbers: dict[str, int] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)  # where another rule names it first

    def in_lark(self, name: str) -> str:
        return f"r{self.numbers.setdefault(name, len(self.numbers))}"


def _tokens(grammar: str) -> Iterator[tuple[str, re.Match[str]]]:
    position = 0
    while position < len(grammar):
        token = TOKEN.match(grammar, position)
        if token is None:
            line = grammar.count("\n", 0, position) + 1
            raise ValueError(f"line {line}: {grammar[position : position + 20]!r} cannot be read")
        position = token.end()
        yield str(token.lastgroup), token


def _add(groups: list[_Group], kind: str, token: re.Match[str], place: str, names: _Names) -> None:
    """Add a token to the innermost of the groups that are open, or open or close one."""
    text = token[0]
    if kind == "name":
        names.places.setdefault(text, place)
        groups[-1].add(names.in_lark(text))
    elif kind == "literal":
        groups[-1].add(_literal(text[1:-1], place))
    elif kind == "class":
        groups[-1].add(_class(text[1:-1], place))
    elif kind == "repetition":
        _repeat(groups[-1], token, place)
    elif text == ".":
        groups[-1].add(ANY)
    elif text == "|":
        groups[-1].alternatives.append([])
    elif text == "(":
        if len(groups) > MAX_DEPTH:
            raise ValueError(f"{place}: groups are nested too deeply, more than {MAX_DEPTH} in each other")
        groups.append(_Group())
    elif text == ")" and len(groups) > 1:
        inner = groups.pop()
        groups[-1].add(f"({inner.written()})")
    else:
        raise ValueError(f"{place}: {text!r} has nothing that it belongs to")


def _repeat(group: _Group, token: re.Match[str], place: str) -> None:
    items = group.alternatives[-1]
    if not items or group.repeated:
        raise ValueError(f"{place}: {token[0]!r} repeats nothing; put what it repeats before it, in parentheses")
    if token["least"] is None:
        times = token[0]
    elif token["comma"] is None:
        times = f"{{{token['least']}}}"
    else:
        times = f"{{{token['least']},{token['most']}}}"
    most = token["most"] if token["comma"] else token["least"]
    items[-1] = NOTHING if most and not most.strip("0") else f"({items[-1]}){times}"
    group.repeated = True


def _literal(written: str, place: str) -> str:
    items = [_terminal(code) for code in _codes(written, place)]
    return items[0] if len(items) == 1 else f"({' '.join(items)})" if items else NOTHING


def _terminal(code: int) -> str:
    character = chr(code)
    return json.dumps(character) if character.isascii() and character.isprintable() else f"/{_in_regex(code)}/"


def _class(written: str, place: str) -> str:
    """A class of characters as a regular expression."""
    negated = written.startswith("^")
    parts = [(match[0], code) for match, code in _characters(written[negated:], place)]
    members, at = [], 0
    while at < len(parts):
        first = last = parts[at][1]
        if at + 2 < len(parts) and parts[at + 1][0] == "-":
            last, at = parts[at + 2][1], at + 2
        if last < first:
            raise ValueError(f"{place}: a range in [{written[:20]}] ends before it begins")
        members.append(_in_regex(first) if first == last else f"{_in_regex(first)}-{_in_regex(last)}")
        at += 1
    if not members:
        raise ValueError(f"{place}: [{written}] has no characters")
    return f"/[{'^' * negated}{''.join(members)}]/"


def _in_regex(code: int) -> str:
    return f"\\x{{{code:X}}}"


def _codes(written: str, place: str) -> list[int]:
    return [code for _, code in _characters(written, place)]


def _characters(written: str, place: str) -> Iterator[tuple[re.Match[str], int]]:
    """The characters of a literal or a class, with how each is written."""
    position = 0
    while position < len(written):
        match = CHARACTER.match(written, position)
        if match is None:
            raise ValueError(f"{place}: {written[position : position + 10]!r} begins with no escape of GBNF")
        position = match.end()
        code = match["x"] or match["u"] or match["U"]
        character = int(code, 16) if code else ord(NAMED.get(match["named"], match["named"] or match["itself"]))
        if character in SURROGATES or character > LAST_CHARACTER:
            raise ValueError(f"{place}: {match[0]} is no character of Unicode")
        yield match, character
