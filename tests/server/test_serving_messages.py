"""Anthropic's client against the server: every text is that of a chat completion with the same messages."""

# ruff: noqa: F811  fixtures

import asyncio
import json

import anthropic
import httpx
import openai
import pytest
from test_serving_faults import calls_that_wait, eventually

from saltus.server import messages
from saltus.server.bodies import MAX_BODY_BYTES
from saltus.server.errors import ApiError
from saltus.server.events import with_pauses
from saltus.server.message_blocks import signature_of
from saltus.server.messages import _read_arguments
from saltus.server.messages_request import MessagesRequest
from saltus.server.served_request import Limits
from saltus.server.translation import conversation
from tiny_server import MESSAGES, PROMPT, alone, client, engine, server, serving  # noqa: F401

ASKED = {"model": "tiny", "messages": MESSAGES, "max_tokens": 24}
TOOL = {"name": "look", "description": "at it", "input_schema": {"type": "object", "properties": {"at": {}}}}


@pytest.fixture
def claude(server) -> anthropic.Anthropic:
    return client_of(server[1])


def client_of(url: str, **settings) -> anthropic.Anthropic:
    return anthropic.Anthropic(**{"base_url": url, "api_key": "any", "max_retries": 0, **settings})


def post(url: str, body: dict, **settings) -> httpx.Response:
    return httpx.post(f"{url}/v1/messages", json={**ASKED, **body}, timeout=60, **settings)


@pytest.mark.parametrize("settings", [{"seed": 3}, {"temperature": 0}, {"seed": 1, "top_p": 0.8, "top_k": 9}])
def test_the_text_is_that_of_a_chat_completion(claude, client, settings):
    talk = [*MESSAGES, {"role": "assistant", "content": "a dog"}, {"role": "user", "content": "the log"}]
    expected = client.chat.completions.create(
        model="tiny", messages=[{"role": "system", "content": "the cat"}, *talk], max_tokens=24, extra_body=settings
    )
    asked = {**ASKED, "system": "the cat", "messages": talk, "extra_body": settings}
    answer = claude.messages.create(**asked)
    (block,) = answer.content
    assert (block.type, block.text) == ("text", expected.choices[0].message.content)
    assert (answer.role, answer.model, answer.stop_reason, answer.stop_sequence) == (
        "assistant", "tiny", "max_tokens", None
    )  # fmt: skip
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == expected.usage.prompt_tokens
    assert usage.output_tokens == expected.usage.completion_tokens == 24
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == block.text
    final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 24)
    assert final.usage.cache_read_input_tokens == expected.usage.prompt_tokens - 1, "the prefix cache has the prompt"


def test_the_events_of_a_stream(server, engine):
    answer = post(server[1], {"stream": True, "seed": 3})
    lines = [line.partition(": ") for line in answer.text.splitlines() if line]
    kinds, events = [value for name, _, value in lines if name == "event"], []
    events = [json.loads(value) for name, _, value in lines if name == "data"]
    assert [event["type"] for event in events] == kinds
    written = [kind for kind in kinds if kind != "ping"]
    deltas = [event for event in events if event["type"] == "content_block_delta"]
    assert written == [
        "message_start", "content_block_start", *["content_block_delta"] * len(deltas), "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert {event["index"] for event in events if "index" in event} == {0}
    assert "".join(delta["delta"]["text"] for delta in deltas) == alone(engine, seed=3).text
    begun = events[0]["message"]
    assert (begun["content"], begun["stop_reason"], begun["usage"]["output_tokens"]) == ([], None, 0)
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 24
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


def test_an_asynchronous_client(server, engine):
    async def ask() -> tuple[str, str]:
        async with anthropic.AsyncAnthropic(base_url=server[1], api_key="any", max_retries=0) as claude:
            whole = await claude.messages.create(**ASKED, extra_body={"seed": 3})
            async with claude.messages.stream(**ASKED, extra_body={"seed": 3}) as stream:
                return whole.content[0].text, await stream.get_final_text()

    expected = alone(engine, seed=3).text
    assert asyncio.run(ask()) == (expected, expected)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_is_named(claude, engine, stream):
    whole = alone(engine, temperature=0.0).text
    stop = whole[5:7]
    asked = {**ASKED, "extra_body": {"temperature": 0}, "stop_sequences": ["not in it", whole[6:9], whole[5:8], stop]}
    if stream:
        with claude.messages.stream(**asked) as arriving:
            answer = arriving.get_final_message()
    else:
        answer = claude.messages.create(**asked)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == whole[: whole.find(stop)]


def test_a_text_that_ends_by_itself(claude):
    ended = {"extra_body": {"temperature": 0, "logit_bias": {"0": 100}}}  # token 0 ends a text
    for answer in (claude.messages.create(**ASKED, **ended), final(claude, **ended)):
        assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
        assert [block.text for block in answer.content] == [""]


def final(claude, **fields):
    with claude.messages.stream(**ASKED, **fields) as stream:
        return stream.get_final_message()


def test_the_fields_of_saltus(claude, engine):
    for speculative in (False, {"method": "lookup", "max_draft_tokens": 2}):
        body = {"seed": 3, "speculative": speculative, "include_metrics": True, "cache_prompt": False}
        answer = claude.messages.create(**ASKED, extra_body={**body, "prediction": {"content": PROMPT}})
        assert answer.content[0].text == alone(engine, seed=3).text
        assert answer.usage.cache_read_input_tokens == 0
        drafted = answer.model_extra["metrics"]["speculative_decoding"]["num_draft_tokens"]
        assert (drafted > 0) == (speculative is not False)


def test_headers_and_fields_of_other_versions_are_accepted(server, engine):
    fields = {
        "metadata": {"user_id": "me"}, "service_tier": "auto", "context_management": {"edits": [{"type": "clear"}]},
        "container": None, "inference_geo": "eu", "speed": "fast", "from_another_version": {"a": [1]}, "seed": 3,
        "cache_control": {"type": "ephemeral"}, "stop_sequences": [],
        "messages": [{"role": "user", "id": "x", "content": [
            {"type": "text", "text": PROMPT, "cache_control": {"type": "ephemeral", "ttl": "1h"}, "citations": None}
        ]}],
    }  # fmt: skip
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "interleaved-thinking-2025-05-14"}
    answer = httpx.post(f"{server[1]}/v1/messages?beta=true", json={**ASKED, **fields}, headers=headers)
    assert answer.json()["content"] == [{"type": "text", "text": alone(engine, seed=3).text}]


def messages_of(**fields) -> list[dict]:
    """The messages of the chat completion that a request stands for."""
    return conversation(MessagesRequest(**{"max_tokens": 1, **fields}).as_chat().messages)


def test_blocks_become_messages():
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "é"}, "caller": {"type": "direct"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "cache_control": {"type": "ephemeral"}}
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    asked = {"role": "user", "content": "?"}
    answers = {"role": "assistant", "content": [thought, hidden, *texts, call]}
    calls = [{"id": "toolu_1", "type": "function", "function": {"name": "look", "arguments": {"at": "é"}}}]
    for given, expected in (
        ([{"role": "user", "content": texts}], [{"role": "user", "content": "a\nb"}]),
        ([asked, {"role": "user", "content": texts}], [{"role": "user", "content": "?\na\nb"}]),
        ([asked, answers], [
            asked, {"role": "assistant", "content": "a\nb", "reasoning_content": "hm", "tool_calls": calls}
        ]),
        ([{"role": "user", "content": [result, {**result, "content": texts}, *texts]}], [
            {"role": "tool", "tool_call_id": "toolu_1", "content": ""},
            {"role": "tool", "tool_call_id": "toolu_1", "content": "a\nb"},
            {"role": "user", "content": "a\nb"},
        ]),
        ([{"role": "user", "content": [{**result, "content": "no", "is_error": True}]}],
         [{"role": "tool", "tool_call_id": "toolu_1", "content": "Error: no"}]),
        ([asked, {"role": "assistant", "content": [{**thought, "thinking": "", "signature": signature_of("hm é")}]}],
         [asked, {"role": "assistant", "content": "", "reasoning_content": "hm é"}]),
        ([asked, {"role": "assistant", "content": [{**thought, "thinking": "", "signature": "EqQBCkYI"}]}],
         [asked, {"role": "assistant", "content": ""}]),
        ([asked, {"role": "system", "content": "be brief"}, {"role": "assistant", "content": "th"}],
         [asked, {"role": "system", "content": "be brief"}, {"role": "assistant", "content": "th"}]),
        ([{"role": "user", "content": []}], [{"role": "user", "content": ""}]),
    ):  # fmt: skip
        assert messages_of(messages=given) == expected


def test_system_prompts():
    billing = "x-anthropic-billing-header: cc_version=2.1; cch=0af31;"
    for system, expected in (
        ("the dog", "the dog"), ("", None), ([], None), ([{"type": "text", "text": "a"}] * 2, "a\na"),
        (f"{billing}\nthe dog", "the dog"), ([{"type": "text", "text": billing}], None),
        ([{"type": "text", "text": billing}, {"type": "text", "text": "the dog"}], "the dog"),
        (f"the dog\n{billing}", f"the dog\n{billing}"),
    ):  # fmt: skip
        found = messages_of(system=system, messages=MESSAGES)
        assert found == ([] if expected is None else [{"role": "system", "content": expected}]) + MESSAGES


@pytest.mark.parametrize(
    "fields",
    [{}, {"system": [{"type": "text", "text": "a cat"}]}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}],
)
def test_counted_tokens_are_those_of_the_prompt(claude, fields):
    if "tool_choice" in fields:
        fields = {**fields, "tool_choice": {"type": fields["tool_choice"]}}
    counted = claude.messages.count_tokens(model="tiny", messages=MESSAGES, **fields).input_tokens
    usage = claude.messages.create(**{**ASKED, "max_tokens": 1}, **fields).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    plain = claude.messages.count_tokens(model="tiny", messages=MESSAGES).input_tokens
    assert (counted > plain) == bool(fields.keys() == {"tools"} or "system" in fields)


@pytest.mark.parametrize("tokens", [0, 1])
def test_without_new_tokens_the_prompt_is_read_into_the_prefix_cache(claude, tokens):
    system = f"the cat sat on the mat {tokens} " * 8
    asked = {**ASKED, "max_tokens": tokens, "system": system, "tools": [TOOL], "tool_choice": {"type": "auto"}}
    read = claude.messages.create(**asked)
    assert read.usage.cache_read_input_tokens < read.usage.input_tokens
    assert (read.stop_reason, read.usage.output_tokens) == ("max_tokens", tokens)
    assert len(read.content) == tokens
    again = claude.messages.create(**{**asked, "max_tokens": 2}).usage
    assert again.cache_read_input_tokens >= read.usage.input_tokens - 1


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
TEXT = {"type": "text", "text": "a"}
RESULT = {"type": "tool_result", "tool_use_id": "1"}


def said(*blocks, role="user") -> dict:
    return {"messages": [{"role": role, "content": [*blocks]}]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_tokens": None}, "max_tokens is missing; add it"),
        ({"max_tokens": -2}, "max_tokens: Input should be greater than or equal to 0"),
        ({"max_tokens": 0, "stream": True},
         "max_tokens is 0, so that nothing is written, but stream asks for more; leave it out"),
        ({"max_tokens": 0, "thinking": {"type": "enabled"}},
         "max_tokens is 0, so that nothing is written, but thinking"),
        ({"max_tokens": 0, "output_config": {"format": {"type": "json_schema", "schema": {}}}},
         "max_tokens is 0, so that nothing is written, but output_config.format"),
        ({"max_tokens": 0, "tools": [TOOL], "tool_choice": {"type": "any"}},
         "max_tokens is 0, so that nothing is written, but tool_choice"),
        ({"messages": []}, "messages has 0 items, but needs 1 or more; add some"),
        ({"messages": [{"content": "a"}]}, "messages.0: the field 'role' is missing"),
        ({"messages": [{"role": "tool", "content": "a"}]},
         "messages.0.role: 'tool' is unknown; choose from 'user', 'assistant', 'system'"),
        (said(IMAGE),
         "there is a block of the type 'image', but only text, tool_result can be read here; leave it out"),
        (said({"type": "document"}), "there is a block of the type 'document'"),
        (said({"type": "tool_use"}), "there is a block of the type 'tool_use'"),
        (said({**RESULT, "content": [IMAGE]}),
         "there is a block of the type 'image', but only text can be read here; leave it out"),
        (said({"type": "tool_use", "id": "1", "name": "look"}, role="assistant"),
         "messages.0.content.0.input is missing; add it"),
        ({"system": [IMAGE]}, "there is a block of the type 'image', but only text can be read here; leave it out"),
        (said(*[TEXT] * 4096), "a conversation has 4,097 messages and parts"),
        (said(*[{**RESULT, "content": [TEXT] * 2048}] * 2), "a conversation has 4,099 messages and parts"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
         "there is a tool of the type 'web_search_20250305', which only Anthropic's servers have; leave it out"),
        ({"tools": [{"name": "look"}]}, "tools.0.input_schema is missing; add it"),
        ({"tools": [TOOL, TOOL]}, "tools has 'look' twice; rename one"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is 'any', but there are no tools; give some"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "go"}}, "tool_choice names 'go', which is not"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice has a name if its type is 'tool'"),
        ({"thread": {"type": "create"}}, "nothing is stored here between requests; leave out thread"),
        ({"compaction": {"type": "auto"}}, "conversations are not shortened here; leave out compaction"),
        ({"mcp_servers": [{"type": "url"}]}, "no MCP servers are called from here; leave out mcp_servers"),
        ({"temperature": 3}, "temperature: Input should be less than or equal to 2"),
        ({"max_tokens": "5"}, "max_tokens: Input should be a number, not a text; leave out the quotes"),
        ({"speculative": {"methods": "lookup"}}, "the field 'methods' is not supported; leave it out"),
        ({"speculative": {"method": "nothing"}}, "unknown method 'nothing'"),
        ({"messages": [{"role": "user", "content": "cat " * 3000}]}, "prompt is too long: the prompt has 12,028 bytes"),
        ({"messages": [{"role": "user", "content": "cat " * 1000}]}, "prompt is too long: "),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_in_one_line(server, changed, message):
    answer = post(server[1], changed)
    error = answer.json()
    assert (answer.status_code, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
    assert error["error"]["message"].startswith(message), error
    assert "\n" not in error["error"]["message"]


def test_errors_are_those_that_the_client_knows(claude, server, monkeypatch):
    for kind, name, fields in (
        (anthropic.NotFoundError, "not_found_error", {"model": "claude"}),
        (anthropic.BadRequestError, "invalid_request_error", {"messages": []}),
    ):
        with pytest.raises(kind) as raised:
            claude.messages.create(**{**ASKED, **fields})
        assert raised.value.type == name
        assert raised.value.request_id == raised.value.response.headers["x-request-id"]
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.batches.list()
    assert httpx.get(f"{server[1]}/v1/messages").json()["error"]["type"] == "invalid_request_error"
    answer = httpx.post(f"{server[1]}/v1/messages", content=b" " * (MAX_BODY_BYTES + 1))
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")
    thread = server[0].engine_thread
    for status, code, name in ((429, 429, "rate_limit_error"), (503, 529, "overloaded_error")):
        refusal = ApiError(status, "later", headers={"Retry-After": "1"})
        monkeypatch.setattr(thread, "submit", lambda *_, refusal=refusal: (_ for _ in ()).throw(refusal))
        answer = post(server[1], {"stream": True})
        assert (answer.status_code, answer.json()["error"]) == (code, {"type": name, "message": "later"})
        assert answer.headers["retry-after"] == "1"
    monkeypatch.setattr(server[0], "check_model", lambda _: 1 / 0)
    with pytest.raises(anthropic.InternalServerError) as raised:
        claude.messages.create(**ASKED)
    assert raised.value.type == "api_error"


def test_an_error_within_a_stream_is_an_event(engine, monkeypatch):
    def fails(*_):
        raise MemoryError

    with serving(engine) as (_, url):
        monkeypatch.setattr(engine.network, "forward", fails)
        with pytest.raises(anthropic.APIStatusError) as raised, client_of(url).messages.stream(**ASKED) as stream:
            stream.until_done()
    assert raised.value.type == "overloaded_error"
    assert "too little memory" in raised.value.api_message


def test_a_key_may_come_in_either_header(engine, monkeypatch):
    with serving(engine, api_keys=["one", "two"]) as (service, url):
        groups, submit = [], service.engine_thread.submit
        monkeypatch.setattr(
            service.engine_thread, "submit", lambda *jobs: (groups.append(jobs[0].request.group), submit(*jobs))
        )
        for headers in (
            {"x-api-key": "two"}, {"authorization": "Bearer two"}, {"x-api-key": "no", "authorization": "Bearer two"},
            {"x-api-key": "two", "authorization": "Bearer no"},
        ):  # fmt: skip
            assert post(url, {}, headers=headers).status_code == 200
        assert groups == ["two"] * 4
        client_of(url, api_key="one").messages.create(**ASKED)
        for wrong in ({}, {"x-api-key": "no"}, {"x-api-key": ""}, {"x-api-key": "onetwo"}):
            answer = post(url, {}, headers=wrong)
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="no").models.list()


def test_a_full_queue(engine, monkeypatch):
    _, permits = calls_that_wait(engine, monkeypatch)
    with serving(engine, Limits(max_batch=1, max_queue=0)) as (service, url):
        try:
            with client_of(url).messages.create(**ASKED, stream=True) as stream:
                assert next(iter(stream)).type == "message_start", "a stream begins before the prompt is read"
                with pytest.raises(anthropic.RateLimitError):
                    client_of(url).messages.create(**ASKED)
            assert eventually(lambda: not service.engine_thread.scheduler.requests or permits.release()), (
                "a client that leaves ends its text"
            )
            assert eventually(lambda: not service.engine_thread.num_open)
        finally:
            permits.release(1000)


def test_a_silent_stream_is_kept_alive(engine, monkeypatch):
    _, permits = calls_that_wait(engine, monkeypatch)
    monkeypatch.setattr(messages, "PING_SECONDS", 0.02)
    with serving(engine) as (_, url):
        try:
            with httpx.stream("POST", f"{url}/v1/messages", json={**ASKED, "seed": 3, "stream": True}) as answer:
                lines = (line for line in answer.iter_lines() if line.startswith("event"))
                found = [next(lines) for _ in range(5)]
                assert found == ["event: message_start", *["event: ping"] * 4]
                permits.release(1000)
                assert [*lines][-1] == "event: message_stop"
        finally:
            permits.release(1000)


def test_pauses_change_no_item_and_leave_nothing_behind():
    left = []

    async def numbers():
        try:
            for number in range(3):
                await asyncio.sleep(0.05 * number)
                yield number
            await asyncio.sleep(100)
        finally:
            left.append(True)

    async def read() -> list:
        found, paused = [], with_pauses(numbers(), 0.01)
        async for item in paused:
            found.append(item)
            if len([one for one in found if one is not None]) == 3 and item is None:
                break
        await paused.aclose()
        await asyncio.sleep(0)
        return found

    found = asyncio.run(read())
    assert [one for one in found if one is not None] == [0, 1, 2]
    assert found.count(None) > 1
    assert left


def test_models_as_anthropics_client_lists_them(claude):
    (card,) = claude.models.list()
    assert (card.id, card.type, card.display_name) == ("tiny", "model", "tiny")
    assert claude.models.retrieve("tiny").created_at == card.created_at


def test_arguments_that_python_or_utf_8_do_not_take():
    written = '{"a": 1e999, "b": %s, "c": "\\ud800", "d": 0.10}' % ("1" * 5000)
    found = _read_arguments(written)
    json.dumps(found, allow_nan=False, ensure_ascii=False).encode()
    assert (found["d"], found["c"]) == (0.1, "?")
    assert _read_arguments('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}") == {}
    assert _read_arguments('{"a": NaN}') == {}
