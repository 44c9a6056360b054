"""Corrupt requests, made by a seeded generator from valid ones of every route: none is a fault of the server."""

import copy
import json
import random

import httpx
import pytest
from test_fim import coder  # noqa: F401

import saltus
from tiny_models import TEMPLATE
from tiny_server import serving

SHORT = {"model": "tiny", "seed": 1, "logit_bias": {"0": 100}}  # token 0 ends a text
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
TALK = [
    {"role": "system", "content": "the"},
    {"role": "user", "content": [{"type": "text", "text": "a cat"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "a dog"},
]
TOOL = {"name": "look", "description": "at it", "parameters": SCHEMA}
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "the"}]},
    {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "a cat"},
]
BLOCKS = [
    {"role": "user", "content": "a cat"},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "the"},
        {"type": "tool_use", "id": "1", "name": "look", "input": {"a": 1}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "a dog"}], "is_error": True},
        {"type": "text", "text": "and"},
    ]},
]  # fmt: skip
METADATA = {"metadata": {"a": "b", "c": ["d", 1.5]}, "user": "u"}
VALID = [
    ("/v1/chat/completions", {**SHORT, **METADATA, "messages": TALK, "max_tokens": 3, "temperature": 0.7}),
    ("/v1/chat/completions", {
        **SHORT, "messages": TALK[:2], "max_completion_tokens": 2, "logprobs": True, "top_logprobs": 3, "n": 2,
        "stop": ["x", "yz"], "stream_options": {"include_usage": True}, "stream": True, "include_metrics": True,
        "prediction": {"type": "content", "content": "the cat"},
        "speculative": {"method": "lookup", "max_draft_tokens": 3},
    }),
    ("/v1/chat/completions", {
        **SHORT, "messages": TALK[:1], "max_tokens": 3, "parallel_tool_calls": False,
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
    }),
    ("/v1/chat/completions", {
        **SHORT, "messages": TALK[:1], "max_tokens": 3, "stream": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    }),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [CALL]}], "max_tokens": 2}),
    ("/v1/completions", {
        **SHORT, "prompt": ["the", "a cat"], "max_tokens": 2, "echo": True, "logprobs": 2, "n": 2, "top_p": 0.9,
        "top_k": 5, "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1,
    }),
    ("/v1/completions", {**SHORT, "prompt": [5, 6, 7], "max_tokens": 2, "stream": True, "ignore_eos": False}),
    ("/v1/completions", {**SHORT, "prompt": "the", "suffix": "cat", "max_tokens": 2, "best_of": 1}),
    ("/v1/completions", {**SHORT, "prompt": [[5], [6]], "max_tokens": 2, "structured_outputs": {"choice": ["a", "b"]}}),
    ("/v1/responses", {
        **SHORT, **METADATA, "input": ITEMS, "instructions": "the", "max_output_tokens": 3, "stream": True,
        "tools": [{"type": "function", **TOOL}], "tool_choice": "none", "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    }),
    ("/v1/responses", {**SHORT, **METADATA, "input": "the", "max_output_tokens": 3, "include": ["a"], "store": False}),
    ("/v1/responses", {**SHORT, **METADATA, "input": "the", "max_output_tokens": 3, "stream": True}),
    ("/v1/messages", {
        **SHORT, **METADATA, "messages": BLOCKS, "system": [{"type": "text", "text": "the"}], "max_tokens": 3,
        "stop_sequences": ["x", "yz"], "thinking": {"type": "enabled", "budget_tokens": 1024}, "stream": True,
        "tools": [{"name": "look", "description": "at it", "input_schema": SCHEMA}], "tool_choice": {"type": "none"},
    }),
    ("/v1/messages", {
        **SHORT, "messages": BLOCKS[:1], "max_tokens": 3, "top_k": 5, "include_metrics": True,
        "tools": [{"name": "look", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    }),
    ("/v1/messages/count_tokens", {"model": "tiny", "system": "the", "messages": BLOCKS}),
    ("/infill", {
        **SHORT, "input_prefix": "the", "input_suffix": "cat", "prompt": "a", "n_predict": 3, "stream": True,
        "input_extra": [{"text": "the dog", "filename": "a.py", "time": 5}],
        "response_fields": ["content", "timings/x"],
    }),
    ("/infill", {**SHORT, "parts": ["the", "cat"], "hole_lengths": [None], "n_predict": 3}),
    ("/tokenize", {"model": "tiny", "prompt": "the cat", "add_special_tokens": False, "return_token_strs": True}),
    ("/tokenize", {"messages": TALK}),
    ("/detokenize", {"model": "tiny", "tokens": [5, 6, 7]}),
]  # fmt: skip
DEEP, HUGE = "«deep»", "«huge»"  # what Python does not write itself
RAW = {DEEP: "[" * 20_000 + "]" * 20_000, HUGE: "1e999"}
WRONG = [
    None, True, False, 0, 1, -1, 1.5, 2**63, -(10**30), 10**400, float("nan"), float("inf"), 1e-320, "", "the", "\x00",
    "\ud800", "a\udfff", "\ufffe", "é" * 300, "a" * 20_000, "0", "{", "null", [], {}, [[]], [None], [{}], [0] * 300,
    ["a"] * 100, ["\ud800"], [-1], [2**70], [1.5, "a"], {"a": 1}, {"": None}, {"\ud800": "\ud800"},
    {"type": "function"}, {"type": "text", "text": 5}, {"name": "look"}, {"$ref": "#"}, {"type": ["object", 5]},
    DEEP, HUGE,
]  # fmt: skip


def place_in(body, chance: random.Random) -> list:
    """The way to some value: each field of an object is as likely, however much is in it."""
    way, value = [], body
    while isinstance(value, dict | list) and value and (not way or chance.random() < 0.9):
        way.append(chance.choice(list(value) if isinstance(value, dict) else range(len(value))))
        value = value[way[-1]]
    return way


def corrupt(body, chance: random.Random):
    """A copy of a body in which a value is another one, is gone, is there twice, or has a name that is not known."""
    whole = [copy.deepcopy(body)]
    *way, last = (0, *place_in(body, chance))
    holder = whole
    for key in way:
        holder = holder[key]
    kind = chance.choice(["replace"] * 5 + ["delete", "wrap", "rename", "repeat"])
    if kind == "replace":
        holder[last] = copy.deepcopy(chance.choice(WRONG))
    elif kind == "wrap":
        holder[last] = [holder[last]]
    elif kind == "repeat" and isinstance(holder, list):
        holder *= chance.choice([2, 40])
    elif isinstance(holder, dict):
        value = holder.pop(last)
        if kind != "delete":
            holder[str(chance.choice(["", "\ud800", "x", f"{last}_", str(last).upper()]))] = value
    return whole[0]


def written(body, chance: random.Random) -> bytes:
    """The bytes of a body, sometimes in another encoding, cut off, or with wrong bytes."""
    text = json.dumps(body, ensure_ascii=chance.random() < 0.5)
    for name, raw in RAW.items():
        text = text.replace(json.dumps(name), raw).replace(f'"{name}"', raw)
    encoding = chance.choice(["utf-8"] * 12 + ["utf-16", "utf-32", "utf-8-sig"])
    found = bytearray(text.encode(encoding, "surrogatepass"))
    if chance.random() < 0.1:
        del found[chance.randrange(len(found)) :]
    if chance.random() < 0.1 and found:
        found[chance.randrange(len(found))] = chance.randrange(256)
    return bytes(found)


def requests(seed: int, count: int):
    """Corrupt requests: a route, a body, and headers."""
    chance = random.Random(seed)
    for number in range(count):
        route, body = VALID[number % len(VALID)]
        for _ in range(chance.choice([1, 1, 1, 2, 3])):
            body = corrupt(body, chance)
            if not isinstance(body, dict | list):
                break
        kind = chance.choice(["application/json"] * 15 + ["text/plain", "application/json; charset=utf-16", ""])
        yield route, written(body, chance), {"content-type": kind}


def refuse_constant(name: str):
    raise AssertionError(f"{name} is not JSON")


def assert_is_answer(answer: httpx.Response) -> None:
    """An answer that clients can read, which is no fault of the server."""
    assert answer.status_code < 500, answer.text[:500]
    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
        found = [json.loads(line, parse_constant=refuse_constant) for line in lines if line != "[DONE]"]
        assert found
        assert not [one for one in found if (one.get("error") or {}).get("type") in ("server_error", "api_error")], (
            found[-1]
        )
    else:
        found = json.loads(answer.content, parse_constant=refuse_constant)
        assert answer.status_code == 200 or "\n" not in found["error"]["message"]


@pytest.fixture(scope="module")
def engine(coder) -> saltus.Engine:  # noqa: F811
    made = coder("qwen")
    made.tokenizer.chat_template = TEMPLATE
    made.limit_context(640)
    return made


@pytest.mark.slow
@pytest.mark.unchecked
def test_the_requests_are_valid_before_they_are_corrupted(engine):
    with serving(engine) as (_, url):
        for route, body in VALID:
            answer = httpx.post(url + route, json=body)
            assert_is_answer(answer)
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 30), pytest.param(1, 1000, marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.unchecked
def test_no_corrupt_request_is_a_fault_of_the_server(engine, seed, count):
    with serving(engine) as (service, url), httpx.Client(timeout=60) as client:
        statuses = set()
        for route, body, headers in requests(seed, count):
            answer = client.post(url + route, content=body, headers=headers)
            try:
                assert_is_answer(answer)
            except AssertionError as error:
                raise AssertionError(f"{route} {body[:2000]!r}") from error
            statuses.add(answer.status_code)
        assert {200, 400} <= statuses
        assert client.post(f"{url}/v1/completions", json={**SHORT, "prompt": "the", "max_tokens": 2}).status_code == 200
        assert service.engine_thread.num_open == 0
