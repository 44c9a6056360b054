"""Send requests to a server of OpenAI's protocol, and record all that a user could see of the answer."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from typing import Any

from saltus.integrations.openai_endpoint import EndpointError, open_url

KEY_STATUSES = (401, 403)  # of a server that wants an API key, or another one
REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a server, and what is added to each request."""

    name: str  # as the report calls it
    url: str  # without /v1
    model: str = ""
    api_key: str = field(default="", repr=False)
    body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    chat: bool = True  # by chat completions; else completions


@dataclass(frozen=True)
class Token:
    """A token of an answer, with the log-probabilities of the likeliest ones in its place, by their bytes."""

    text: bytes
    logprob: float
    top: Mapping[bytes, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """What a user gets: the text (reasoning first), how it ended, counts, and faults of its form."""

    text: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    tokens: tuple[Token, ...] | None = None  # if log-probabilities were requested
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    draft_counts: tuple[int, int] | None = None  # drafted and accepted, where the answer names them
    seconds: float = 0.0
    form_faults: tuple[str, ...] = ()

    @property
    def completion_tokens(self) -> int | None:
        """The tokens that the server counted."""
        count = self.usage.get("completion_tokens")
        return count if isinstance(count, int) else None


@dataclass(frozen=True)
class Request:
    """One request, without what a side adds to it."""

    prompt: str
    max_tokens: int = 48
    temperature: float = 0.0
    seed: int | None = None
    stream: bool = False
    logprobs: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)


def server_address(url: str) -> str:
    """The address without /v1. Errors: ValueError."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url}: give an address such as http://localhost:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def request_body(side: Side, request: Request) -> dict[str, Any]:
    """The body of a request to this side."""
    body: dict[str, Any] = {"model": side.model, "max_tokens": request.max_tokens, "temperature": request.temperature}
    body |= {"messages": [{"role": "user", "content": request.prompt}]} if side.chat else {"prompt": request.prompt}
    if request.seed is not None:
        body["seed"] = request.seed
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if request.logprobs:
        body |= {"logprobs": True, "top_logprobs": 20} if side.chat else {"logprobs": 5}
    return body | dict(request.more) | dict(side.body)


def curl_line(side: Side, request: Request) -> str:
    """A command that sends this request, without keys and the values of headers."""
    parts = ["curl", "-s", side.url + _route(side), "-H", "Content-Type: application/json"]
    if side.api_key:
        parts += ["-H", "Authorization: Bearer KEY"]
    for name in side.headers:
        parts += ["-H", f"{name}: VALUE"]
    return shlex.join([*parts, "-d", json.dumps(request_body(side, request), ensure_ascii=False)])


def _route(side: Side) -> str:
    return "/v1/chat/completions" if side.chat else "/v1/completions"


def answer(side: Side, request: Request) -> Reply:
    """Send a request, and read the whole answer. Errors: EndpointError."""
    return post(side, _route(side), request_body(side, request))


def post(side: Side, route: str, body: Mapping[str, Any]) -> Reply:
    """The answer to a body that is complete. Errors: EndpointError."""
    started = time.perf_counter()
    with open_route(side, route, body) as response:
        try:
            reply = _read_stream(response) if body.get("stream") else _read_whole(response.read())
        except (OSError, HTTPException) as error:
            raise EndpointError(f"{side.url} broke off an answer ({error})") from None
    return replace(reply, seconds=time.perf_counter() - started)


def answer_all(
    side: Side, requests: Sequence[Request], clients: int, on_answer: Callable[[], Any] = lambda: None
) -> list[Reply]:
    """The answers in the order of `requests`, at most `clients` at a time. Errors: EndpointError."""

    def one(request: Request) -> Reply:
        reply = answer(side, request)
        on_answer()
        return reply

    if clients == 1:
        return [one(request) for request in requests]
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(one, requests))


def get_json(side: Side, path: str) -> Any:
    """What a GET brings, as JSON; None if the server does not have it. Errors: EndpointError if it does not answer."""
    text = get_text(side, path)
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return None


def get_text(side: Side, path: str) -> str | None:
    """What a GET brings; None if the server does not have it. Errors: EndpointError if it does not answer."""
    try:
        with open_route(side, path, None) as response:
            return response.read().decode("utf-8", "replace")
    except EndpointError as error:
        if error.status in (*KEY_STATUSES, None):
            raise
        return None


def open_route(side: Side, path: str, body: Mapping[str, Any] | None) -> Any:
    """The open response. Errors: EndpointError of one line."""
    try:
        return open_url(side.url + path, body, side.api_key, side.headers)
    except EndpointError as error:
        if error.status not in KEY_STATUSES:
            raise
        raise EndpointError(f"{error}; give --api-key", error.status, error.reason) from None


def _read_whole(data: bytes) -> Reply:
    event, fault = _parse_json(data)
    if event is None:
        return Reply(form_faults=(fault or "an answer is not a JSON object",))
    return _collect([event], [fault] if fault else [])


def _read_stream(response: Iterable[bytes]) -> Reply:
    events: list[dict[str, Any]] = []
    faults: list[str] = []
    done = False
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            done = True
            continue
        if done:
            faults.append("a stream goes on after [DONE]")
        event, fault = _parse_json(data)
        if fault:
            faults.append(fault)
        if event is not None:
            events.append(event)
    if not done:
        faults.append("a stream ends without [DONE]")
    return _collect(events, faults)


def _parse_json(data: bytes) -> tuple[dict[str, Any] | None, str | None]:
    try:
        text, fault = data.decode("utf-8"), None
    except UnicodeDecodeError:
        text, fault = data.decode("utf-8", "replace"), "an answer is not UTF-8"
    try:
        value = json.loads(text)
    except ValueError:
        return None, "an answer is not JSON"
    return (value, fault) if isinstance(value, dict) else (None, "an answer is not a JSON object")


def _parts(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    return choice.get("message") or choice.get("delta") or {}


def _choice_text(choice: Mapping[str, Any]) -> str:
    parts = _parts(choice)
    reasoning = parts.get("reasoning_content") or parts.get("reasoning") or ""
    return reasoning + (parts.get("content") or "") + (choice.get("text") or "")


def _collect(events: Sequence[Mapping[str, Any]], faults: list[str]) -> Reply:
    """One reply of all events of a stream, or of the one object of a whole answer."""
    pieces: list[str] = []
    tokens: list[Token] | None = None
    calls: dict[int, dict[str, Any]] = {}
    reason, usage, drafts = None, {}, None
    for event in events:
        usage = event.get("usage") or usage
        timings = event.get("timings") or {}
        if "draft_n" in timings:
            drafts = int(timings["draft_n"]), int(timings.get("draft_n_accepted", 0))
        for choice in event.get("choices") or ():
            text = _choice_text(choice)
            if reason is not None and text:
                faults.append("a stream brings text after its finish_reason")
            pieces.append(text)
            reason = choice.get("finish_reason") or reason
            if (read := _read_tokens(choice.get("logprobs"))) is not None:
                tokens = [*(tokens or ()), *read]
            for number, call in enumerate(_parts(choice).get("tool_calls") or ()):
                _add_call(calls, call.get("index", number), call)
    text = "".join(pieces)
    return Reply(
        text, reason, usage, None if tokens is None else tuple(tokens), tuple(calls.values()), drafts,
        form_faults=tuple(faults),
    )  # fmt: skip


def _add_call(calls: dict[int, dict[str, Any]], index: int, part: Mapping[str, Any]) -> None:
    function = part.get("function") or {}
    call = calls.setdefault(index, {"name": "", "arguments": ""})
    call["name"] += function.get("name") or ""
    call["arguments"] += function.get("arguments") or ""


def _read_tokens(logprobs: Any) -> list[Token] | None:
    """Tokens of chat completions (`content`) or completions (`tokens`)."""
    if not isinstance(logprobs, dict):
        return None
    if isinstance(content := logprobs.get("content"), list):
        return [Token(_token_bytes(one), float(one["logprob"]), _top_of(one)) for one in content]
    if isinstance(names := logprobs.get("tokens"), list):
        values = logprobs.get("token_logprobs") or []
        tops = logprobs.get("top_logprobs") or [None] * len(names)
        return [
            Token(name.encode(), float(value or 0.0), {key.encode(): float(v) for key, v in (top or {}).items()})
            for name, value, top in zip(names, values, tops, strict=False)
        ]
    return None


def _top_of(entry: Mapping[str, Any]) -> dict[bytes, float]:
    return {_token_bytes(one): float(one["logprob"]) for one in entry.get("top_logprobs") or ()}


def _token_bytes(entry: Mapping[str, Any]) -> bytes:
    raw = entry.get("bytes")
    return bytes(raw) if raw else str(entry.get("token", "")).encode("utf-8", "replace")
