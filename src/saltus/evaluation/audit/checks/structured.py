"""JSON by a schema and calls of tools: valid on both sides, alone and at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from saltus.evaluation.audit.client import Reply, Request, curl_line
from saltus.evaluation.audit.context import Audit
from saltus.evaluation.audit.features import JSON_FORMAT, PERSON, TOOL_FIELDS
from saltus.evaluation.audit.statistics import rate_interval
from saltus.evaluation.audit.verdicts import FINDING, SAME, Verdict, not_checked

TOKENS = 128
PEOPLE = (
    "Jane Austen, 1775", "Ada Lovelace, 1815", "Charles Darwin, 1809", "Marie Curie, 1867", "Bertha Benz, 1849",
    "Zheng He, 1371", "Frida Kahlo, 1907", "Alan Turing, 1912", "Emmy Noether, 1882", "Nikola Tesla, 1856",
    "Wangari Maathai, 1940", "José Martí, 1853", "Søren Kierkegaard, 1813", "Astrid Lindgren, 1907",
    "Erwin Schrödinger, 1887", "Clara Schumann, 1819",
)  # fmt: skip


def run(audit: Audit) -> Iterator[Verdict]:
    """A line a side for each of both."""
    yield from _checked(audit, "JSON schemas", "valid JSON", {"response_format": JSON_FORMAT}, json_fault)
    yield from _checked(audit, "tools", "valid calls of tools", TOOL_FIELDS, call_fault)


def _checked(
    audit: Audit, feature: str, name: str, fields: Mapping[str, Any], fault_of: Callable[[Reply], str | None]
) -> Iterator[Verdict]:
    if not audit.features.has(feature):
        yield not_checked(name, audit.features.missing[feature])
        return
    requests = [
        Request(f"Save this person, with the year of birth, as JSON: {each}", TOKENS, more=fields) for each in PEOPLE
    ]
    for side in audit.sides:
        replies = [reply for clients in (1, audit.settings.clients) for reply in audit.answers(side, requests, clients)]
        finished = [reply for reply in replies if reply.finish_reason != "length"]
        faults = [(request, fault) for request, reply in zip(requests * 2, replies, strict=True)
                  if reply.finish_reason != "length" and (fault := fault_of(reply))]  # fmt: skip
        found = [fault for _, fault in faults]
        low, high = rate_interval(len(finished) - len(found), len(finished))
        words = f"{len(finished) - len(found)} of {len(finished)} finished answers [{low:.0%}, {high:.0%}]"
        if cut := len(replies) - len(finished):
            words += f"; {cut} were cut off at {TOKENS} tokens"
        if not finished:
            yield not_checked(f"{name} {side.name}", f"all answers were cut off at {TOKENS} tokens")
        else:
            repeat = [curl_line(side, request) for request, _ in faults[:1]]
            yield Verdict(f"{name} {side.name}", FINDING if found else SAME, words, examples=found[:3], repeat=repeat)


def json_fault(reply: Reply) -> str | None:
    """Why an answer is no JSON of the schema PERSON."""
    return _person_fault(reply.text)


def call_fault(reply: Reply) -> str | None:
    """Why an answer is no call of the tool."""
    if not reply.tool_calls:
        return f"no call, but {reply.text[:60]!r}"
    for call in reply.tool_calls:
        if call["name"] != "save_person":
            return f"a call of {call['name']!r}, which does not exist"
        if fault := _person_fault(call["arguments"]):
            return fault
    return None


def _person_fault(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return f"no JSON: {text[:80]!r}"
    kinds = {"name": str, "born": int}
    if not isinstance(value, dict) or set(value) != set(PERSON["properties"]):
        return f"other fields than name and born: {text[:80]!r}"
    wrong = next((name for name, kind in kinds.items() if type(value[name]) is not kind), None)
    return f"{wrong} has the wrong type: {text[:80]!r}" if wrong else None
