"""Are answers in a form, and calls of tools, valid under load? Clients ask for both at once, greedy and sampled.

    python benchmarks/serve_valid.py --requests 2000 --clients 16

Starts `saltus serve` on this machine, or takes a server that runs already (--endpoint URL). Each answer that ends by
itself is checked against its JSON schema, regular expression or choice, and each call against the schema of its tool,
by jsonschema, which knows nothing of grammars. Answers that their token limit cuts off are counted; they must hold no
part of a call as text. Where one token begins a call, some requests that need not call get it more often. Exits with 1
if an answer is invalid or missing, or if nothing was drafted.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count, product
from typing import Any

import httpx
import jsonschema
from rich.console import Console
from rich.progress import Progress

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
WORD = {"type": "string", "maxLength": 12}
SCHEMAS: dict[str, dict[str, Any]] = {
    "ticket": {
        "category": {"enum": ["question", "task", "opinion"]}, "urgent": {"type": "boolean"},
        "priority": {"type": "integer", "minimum": 1, "maximum": 5},
        "keywords": {"type": "array", "items": WORD, "maxItems": 3},
    },
    "person": {
        "name": {"$ref": "#/$defs/word"}, "born": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
        "nickname": {"anyOf": [WORD, {"type": "null"}]},
    },
    "order": {
        "items": {"type": "array", "minItems": 1, "maxItems": 2, "items": {
            "type": "object", "properties": {"sku": WORD, "count": {"type": "integer", "minimum": 1, "maximum": 99}},
            "required": ["sku", "count"], "additionalProperties": False,
        }},
        "note": {"const": "a \"quoted\" </tool_call> note\n"},
    },
}  # fmt: skip
PATTERN, CHOICES = "[a-c]{2,6}-[0-9]{3}", ["yes", "no", "it depends"]
PROMPTS = ("What is the weather in Rome?", "Book a table for two.", "Who wrote Emma?", "My order is late.", "1 + 1?")

Check = Callable[[str, Sequence[dict[str, Any]]], None]
"""Raises an error for a text and the calls of an answer that ended by itself."""


def schema_of(name: str) -> dict[str, Any]:
    """One of the schemas, with what all have."""
    properties = SCHEMAS[name]
    return {
        "type": "object", "properties": properties, "required": [*properties], "additionalProperties": False,
        "$defs": {"word": WORD},
    }  # fmt: skip


TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema_of(name)}} for name in SCHEMAS]
FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]


def check_calls(calls: Sequence[dict[str, Any]]) -> None:
    for call in calls:
        jsonschema.validate(json.loads(call["arguments"]), schema_of(call["name"]))


def is_json(name: str) -> Check:
    """The text is JSON of a schema."""
    return lambda text, _: jsonschema.validate(json.loads(text), schema_of(name))


def matches(pattern: str) -> Check:
    """The text is what a regular expression describes."""

    def check(text: str, _: Sequence[dict[str, Any]]) -> None:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r} does not match {pattern}")

    return check


def calls_of(*names: str, least: int = 1, most: int = 99) -> Check:
    """The answer is calls of these tools and no text."""

    def check(text: str, calls: Sequence[dict[str, Any]]) -> None:
        if not least <= len(calls) <= most or {call["name"] for call in calls} - set(names):
            raise ValueError(f"{len(calls)} calls of {[call['name'] for call in calls]}")
        if least and text:
            raise ValueError(f"a text beside required calls: {text!r}")

    return check


def kinds(bias: dict[str, float]) -> dict[str, tuple[str, dict[str, Any], Check]]:
    """Routes, fields and checks of the kinds of requests. `bias` makes calls more likely where none is required."""
    found: dict[str, tuple[str, dict[str, Any], Check]] = {}
    for name in SCHEMAS:
        form = {"name": name, "schema": schema_of(name), "strict": True}
        named = {"type": "function", "function": {"name": name}}
        found |= {
            f"format {name}": (
                CHAT, {"response_format": {"type": "json_schema", "json_schema": form}}, is_json(name),
            ),
            f"guided {name}": (COMPLETIONS, {"guided_json": schema_of(name)}, is_json(name)),
            f"text {name}": (RESPONSES, {"text": {"format": {"type": "json_schema", **form}}}, is_json(name)),
            f"tool {name}": (CHAT, {"tools": TOOLS, "tool_choice": named}, calls_of(name, most=1)),
        }  # fmt: skip
    required = {"tool_choice": "required", "parallel_tool_calls": False}
    return found | {
        "regex": (CHAT, {"guided_regex": PATTERN}, matches(PATTERN)),
        "choice": (COMPLETIONS, {"guided_choice": CHOICES}, matches("|".join(CHOICES))),
        "one call": (CHAT, {"tools": TOOLS, **required}, calls_of(*SCHEMAS, most=1)),
        "calls": (CHAT, {"tools": TOOLS, "tool_choice": "required"}, calls_of(*SCHEMAS)),
        "auto": (CHAT, {"tools": TOOLS}, calls_of(*SCHEMAS, least=0)),
        "auto, likely": (CHAT, {"tools": TOOLS, "logit_bias": bias}, calls_of(*SCHEMAS, least=0)),
        "auto, one": (
            CHAT, {"tools": TOOLS, "logit_bias": bias, "parallel_tool_calls": False},
            calls_of(*SCHEMAS, least=0, most=1),
        ),
        "response call": (RESPONSES, {"tools": FLAT_TOOLS, **required}, calls_of(*SCHEMAS, most=1)),
    }  # fmt: skip


def body_of(route: str, prompt: str, max_tokens: int, fields: dict[str, Any]) -> dict[str, Any]:
    """A request of a route."""
    if route == COMPLETIONS:
        return {"prompt": prompt, "max_tokens": max_tokens, **fields}
    if route == RESPONSES:
        return {"input": prompt, "max_output_tokens": max_tokens, **fields}
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, **fields}


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The objects of an answer: one, or those of a stream."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return [answer.json()]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def read_answer(answer: httpx.Response) -> tuple[str, list[dict[str, Any]], bool, Counter[str]]:
    """The text, the calls, whether it ended by itself, and counts of drafting. Errors: ValueError for an error."""
    events = events_of(answer)
    if errors := [event["error"] for event in events if event.get("error")]:
        raise ValueError(f"{answer.status_code}: {errors[0]['message']}")
    drafted: Counter[str] = Counter()
    for event in events:
        metrics = (event.get("response") or event).get("metrics", {}).get("speculative_decoding", {})
        drafted.update({name: metrics.get(name, 0) for name in ("num_draft_tokens", "num_accepted_draft_tokens")})
    if "choices" not in events[0]:
        response = events[-1].get("response", events[-1])
        items = response["output"]
        text = "".join(part["text"] for item in items for part in item.get("content", ()))
        return text, [one for one in items if "arguments" in one], response["status"] == "completed", drafted
    text, calls, reason = "", [], None
    for choice in (choice for event in events for choice in event["choices"]):
        message = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
        text += message.get("content") or ""
        calls += [call["function"] for call in message.get("tool_calls") or ()]
        reason = choice["finish_reason"] or reason
    return text, calls, reason in ("stop", "tool_calls"), drafted


class Load:
    """The requests that wait, and what came of the others."""

    def __init__(self, url: str, requests: int, max_tokens: int) -> None:
        self.url, self.max_tokens = url, max_tokens
        self.numbers, self.requests, self.lock = count(), requests, threading.Lock()
        self.outcomes: Counter[tuple[str, str]] = Counter()  # by kind
        self.drafted: Counter[str] = Counter()
        self.faults: list[str] = []
        self.num_calls = 0
        asked = {"prompt": "<tool_call>", "add_special_tokens": False}
        begin = httpx.post(f"{url}/tokenize", json=asked, timeout=60).json()["tokens"]
        self.names = kinds({str(begin[0]): 20.0} if len(begin) == 1 else {})
        self.kinds = list(product(self.names.items(), (0.0, 1.0), (False, True)))  # temperature, stream

    def client(self) -> None:
        """Send one request after the other."""
        with httpx.Client(timeout=600) as http:
            while True:
                with self.lock:
                    number = next(self.numbers)
                if number >= self.requests:
                    return
                (kind, asked), temperature, stream = self.kinds[number % len(self.kinds)]
                prompt = f"{number}. {PROMPTS[number % len(PROMPTS)]}"
                settings = {"seed": number, "temperature": temperature, "stream": stream, "include_metrics": True}
                outcome, fault, drafted = self._ask(http, *asked, prompt, settings)
                with self.lock:
                    self.outcomes[kind, outcome] += 1
                    self.drafted += drafted
                    if fault:
                        self.faults.append(f"{kind}, request {number}: {fault}")

    def _ask(
        self,
        http: httpx.Client,
        route: str,
        fields: dict[str, Any],
        check: Check,
        prompt: str,
        settings: dict[str, Any],
    ) -> tuple[str, str, Counter[str]]:
        """The outcome of a request, what is wrong with it, and counts of drafting."""
        drafted: Counter[str] = Counter()
        try:
            body = body_of(route, prompt, self.max_tokens, {**fields, **settings})
            text, calls, ended, drafted = read_answer(http.post(self.url + route, json=body))
            check_calls(calls)
            with self.lock:
                self.num_calls += len(calls)
            if "tools" in fields and "<tool_call" in text:
                raise ValueError(f"a part of a call is text: {text!r}")
            if ended:
                check(text, calls)
            return "valid" if ended else "cut off", "", drafted
        except Exception as error:
            return "invalid", f"{type(error).__name__}: {error}".splitlines()[0], drafted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=300, help="of an answer")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--endpoint", help="the address of a server that runs already, such as http://localhost:8000")
    options = parser.parse_args()
    with ExitStack() as stack:
        url = options.endpoint
        if url is None:
            from serve_load import own_server

            url = stack.enter_context(own_server(options.method, options.model, options.clients))
        load, started = Load(url, options.requests, options.max_tokens), time.perf_counter()
        threads = [threading.Thread(target=load.client) for _ in range(options.clients)]
        for thread in threads:
            thread.start()
        with Progress(console=Console(stderr=True)) as progress:
            answers = progress.add_task("answers", total=options.requests)
            while any(thread.is_alive() for thread in threads):
                progress.update(answers, completed=sum(load.outcomes.values()))
                time.sleep(0.2)
    print(f"{options.requests} requests of {options.clients} clients, {time.perf_counter() - started:.0f} s")
    outcomes = ("valid", "cut off", "invalid")
    print(f"{'kind':16} {outcomes[0]:>8} {outcomes[1]:>8} {outcomes[2]:>8}")
    for kind in [*load.names, "all"]:
        counts = [(end, n) for (of, end), n in load.outcomes.items() if kind in (of, "all")]
        sums = [sum(n for end, n in counts if end == one) for one in outcomes]
        print(f"{kind:16} {sums[0]:8} {sums[1]:8} {sums[2]:8}")
    drafts, accepted = load.drafted["num_draft_tokens"], load.drafted["num_accepted_draft_tokens"]
    print(f"calls of tools: {load.num_calls:,}; draft tokens: {drafts:,}, accepted: {accepted:,}")
    for fault in load.faults[:10]:
        print(fault, file=sys.stderr)
    raise SystemExit(1 if load.faults or not drafts else 0)


if __name__ == "__main__":
    main()
