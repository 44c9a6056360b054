"""Find out what a server is and what it understands, by asking."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from saltus.evaluation.audit.client import KEY_STATUSES, Request, Side, answer, get_json, open_route
from saltus.integrations.openai_endpoint import EndpointError

OWNERS = {  # `owned_by` of /v1/models
    "vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "llama.cpp": "llama.cpp", "library": "Ollama",
    "tensorrt_llm": "TensorRT-LLM", "saltus": "Saltus",
}  # fmt: skip
PROBE = "Name three birds and say where each of them lives."
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "born": {"type": "integer"}},
    "required": ["name", "born"],
    "additionalProperties": False,
}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
TOOL = {
    "type": "function",
    "function": {"name": "save_person", "description": "Save a person's name and year of birth.", "parameters": PERSON},
}
TOOL_FIELDS = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "save_person"}}}


@dataclass(frozen=True)
class Features:
    """The server's program and version, and why features are missing; one that is there has no entry."""

    program: str = "unknown server"
    version: str = ""
    missing: Mapping[str, str] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """True if the server understands it."""
        return name not in self.missing


def connect(side: Side) -> Side:
    """The side with its model, unless it is named, and its route (chat or completions). Errors: ValueError."""
    if not side.model:
        listed = get_json(side, "/v1/models")
        try:
            side = replace(side, model=str(listed["data"][0]["id"]))
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"{side.url}/v1/models lists no model; name it with --model") from None
    try:
        answer(side, Request(PROBE, max_tokens=1))
        return side
    except EndpointError as refused:
        if refused.status in (*KEY_STATUSES, None):
            raise
        plain = replace(side, chat=False)
        try:
            answer(plain, Request(PROBE, max_tokens=1))
            return plain
        except EndpointError:
            raise refused from None


def find_features(side: Side) -> Features:
    """Ask the server for everything that the checks need. Errors: EndpointError if it goes away."""
    program, version = identify(side)
    missing = {}
    for name, probe in PROBES.items():
        try:
            reason = probe(side)
        except EndpointError as error:
            if error.status is None:
                raise
            reason = f"the server refuses it ({error.status}): {error.reason[:160]}"
        if reason:
            missing[name] = reason
    return Features(program, version, missing)


def measure_rate(side: Side) -> float:
    """Tokens a second of one answer. Errors: EndpointError."""
    reply = answer(side, Request(PROBE, max_tokens=24))
    return (reply.completion_tokens or max(1, len(reply.text) // 4)) / max(reply.seconds, 1e-3)


def identify(side: Side) -> tuple[str, str]:
    """The program and its version, as far as routes tell."""
    models = get_json(side, "/v1/models")
    try:
        owner = str(models["data"][0].get("owned_by", "")).lower()
    except (KeyError, IndexError, TypeError, AttributeError):
        owner = ""
    program = OWNERS.get(owner, "")
    if not program and (props := get_json(side, "/props")) and "build_info" in props:
        return "llama.cpp", str(props["build_info"])
    if program == "llama.cpp":
        return program, str((get_json(side, "/props") or {}).get("build_info", ""))
    if program in ("Ollama", ""):
        version = (get_json(side, "/api/version") or {}).get("version")
        if version:
            return "Ollama", str(version)
    if program in ("SGLang", ""):
        info = get_json(side, "/get_server_info")
        if isinstance(info, dict) and info:
            return "SGLang", str(info.get("version", ""))
    found = get_json(side, "/version")
    version = str(found.get("version", "")) if isinstance(found, dict) else ""
    return program or "unknown server", version


def _seed(side: Side) -> str | None:
    texts = [answer(side, Request(PROBE, 24, 1.0, seed)).text for seed in (11, 11, 12, 13, 14)]
    if texts[0] == texts[1]:
        return "all seeds give one text" if len(set(texts)) == 1 else None
    again = [answer(side, Request(PROBE, 24, 1.0, 11)).text for _ in range(2)]
    return None if len({*texts[:2], *again}) < 4 else "a seed does not repeat its text"


def _logprobs(side: Side) -> str | None:
    reply = answer(side, Request(PROBE, 4, logprobs=True))
    if not reply.tokens:
        return "answers bring none"
    return None if any(token.top for token in reply.tokens) else "answers bring none of the likeliest tokens"


def _stream(side: Side) -> str | None:
    reply = answer(side, Request(PROBE, 8, stream=True))
    return None if reply.text else "a stream brings no text"


def _json_schema(side: Side) -> str | None:
    if not side.chat:
        return "the server has no chat completions for this model"
    reply = answer(side, Request("Who wrote Emma? Answer in JSON.", 96, more={"response_format": JSON_FORMAT}))
    if not reply.text.lstrip().startswith("{"):
        return "the schema is accepted and not followed"
    if reply.finish_reason != "length":
        try:
            json.loads(reply.text)
        except ValueError:
            return "the schema is accepted and not followed"
    return None


def _tools(side: Side) -> str | None:
    if not side.chat:
        return "the server has no chat completions for this model"
    reply = answer(side, Request("Save Jane Austen, born 1775.", 128, more=TOOL_FIELDS))
    if reply.tool_calls or reply.finish_reason == "length":
        return None
    return "an answer has no call, which the request demands; perhaps the model's chat template knows no tools"


def _metrics(side: Side) -> str | None:
    try:
        with open_route(side, "/metrics", None):
            return None
    except EndpointError as error:
        if error.status is None:
            raise
        return f"there is no /metrics ({error.status})"


PROBES: Mapping[str, Callable[[Side], str | None]] = {
    "seed": _seed,
    "logprobs": _logprobs,
    "streams": _stream,
    "JSON schemas": _json_schema,
    "tools": _tools,
    "metrics": _metrics,
}


def describe_features(features: Features) -> dict[str, Any]:
    """For the report."""
    return {
        "program": features.program,
        "version": features.version,
        "understands": [name for name in PROBES if features.has(name)],
        "missing": dict(features.missing),
    }
