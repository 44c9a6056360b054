"""Structured output and tools over HTTP, by OpenAI's client."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from test_grammar import SCHEMA, TOOLS

import saltus
from saltus.engine.chat.tool_calls import HERMES, ToolCallReader, tool_grammar
from saltus.engine.grammar import CANNOT_FOLLOW, Grammar, GrammarConstraint
from tiny_models import TEMPLATE
from tiny_server import JSON, MESSAGES, PROMPT, alone, client, server  # noqa: F401


@pytest.fixture(scope="module")
def engine(tiny_folder, partners) -> saltus.Engine:
    """With room for prompts that describe tools, a byte a token."""
    made = saltus.load(str(tiny_folder(max_position_embeddings=4096)), "lookup", options=partners, adaptive=False)
    made.tokenizer.chat_template = TEMPLATE
    return made


FORMAT = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": FORMAT}, Grammar.json_schema(SCHEMA)),
        ({"extra_body": {"guided_json": json.dumps(SCHEMA)}}, Grammar.json_schema(SCHEMA)),
        ({"extra_body": {"guided_regex": "[a-c]{4}"}}, Grammar.regex("[a-c]{4}")),
        ({"extra_body": {"guided_choice": ["yes", "no"]}}, Grammar.choice(["yes", "no"])),
        ({"extra_body": {"structured_outputs": {"json": SCHEMA}}}, Grammar.json_schema(SCHEMA)),
        ({"extra_body": {"structured_outputs": {"grammar": 'start: "ab"'}}}, Grammar.lark('start: "ab"')),
    ],
    ids=["response_format", "guided_json", "regex", "choice", "structured", "lark"],
)
def test_an_answer_in_a_form_is_that_of_the_engine_alone(client, engine, fields, grammar, stream):  # noqa: F811
    asked = {"model": "tiny", "messages": MESSAGES, "seed": 5, "max_tokens": 60, "stream": stream, **fields}
    answer = client.chat.completions.create(**asked)
    text = (
        "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        if stream
        else answer.choices[0].message.content
    )
    assert text == alone(engine, seed=5, max_new_tokens=60, grammar=grammar).text


def test_a_completion_in_a_form(client, engine):  # noqa: F811
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, seed=1, max_tokens=60, n=2, extra_body={"guided_json": SCHEMA}
    )
    for seed, choice in enumerate(answer.choices, start=1):
        grammar = Grammar.json_schema(SCHEMA)
        assert choice.text == alone(engine, PROMPT, raw=True, seed=seed, max_new_tokens=60, grammar=grammar).text


def test_any_json_object(client):  # noqa: F811
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, seed=1, max_tokens=200, response_format={"type": "json_object"}
    ).choices[0]
    assert answer.message.content.startswith("{")
    if answer.finish_reason == "stop":
        json.loads(answer.message.content)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}], ids=["any", "one"])
def test_required_calls_of_tools(client, engine, choice, stream):  # noqa: F811
    asked = {"messages": MESSAGES, "seed": 2, "max_tokens": 400, "tools": TOOLS[:1], "tool_choice": choice}
    answer = client.chat.completions.create(model="tiny", stream=stream, parallel_tool_calls=False, **asked)
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        (call,) = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
        reason, content = chunks[-1].finish_reason, "".join(chunk.delta.content or "" for chunk in chunks)
        assert call.index == 0
    else:
        (call,), reason = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
        content = answer.choices[0].message.content or ""
    grammar = tool_grammar(TOOLS[:1], "required", False, engine.tokenizer)
    text = alone(engine, seed=2, max_new_tokens=400, grammar=grammar, tools=TOOLS[:1]).text
    rest, (expected,) = ToolCallReader(HERMES).read(text, last=True)
    assert (call.function.name, call.function.arguments) == (expected.name, expected.arguments)
    assert json.loads(call.function.arguments).keys() == {"animal", "number"}
    assert (reason, content, rest) == ("tool_calls", "", "")
    assert call.id.startswith("call_")


def test_tools_that_need_not_be_called(client, engine):  # noqa: F811
    """A random model writes the tag once in a million texts; the prompt names the tools, and the text is free."""
    asked = {"model": "tiny", "messages": MESSAGES, "seed": 2, "max_tokens": 24}
    answer = client.chat.completions.create(**asked, tools=TOOLS)
    grammar = tool_grammar(TOOLS, "auto", True, engine.tokenizer)
    assert answer.choices[0].message.content == alone(engine, seed=2, tools=TOOLS, grammar=grammar).text
    ignored = client.chat.completions.create(**asked, tools=TOOLS, tool_choice="none")
    assert ignored.choices[0].message.content == alone(engine, seed=2).text
    assert ignored.usage.prompt_tokens < answer.usage.prompt_tokens


def test_a_conversation_with_calls_goes_on(client):  # noqa: F811
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"animal": "cat"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a cat"},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, max_tokens=5)
    assert answer.choices[0].finish_reason


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}, "strict": True}}},
            "type",
        ),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"tools": TOOLS, "guided_regex": "a+"}, "tools"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools has 'look' twice"),
        ({"tool_choice": "required"}, "no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "run"}}}, "run"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "strict": True, "parameters": {"type": "x"}}}]},
            "type",
        ),
        ({"guided_choice": ["b"], "ignore_eos": True}, "grammar"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(server, fields, named):  # noqa: F811
    answer = httpx.post(f"{server[1]}/v1/chat/completions", headers=JSON, json={"messages": MESSAGES, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert named in f"{error['param']} {error['message']}"
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    "calls",
    [
        5, "look", {"function": {"name": "look"}}, [5], [None], [{}], [{"function": "look"}], [{"function": None}],
        [{"function": {}}], [{"function": {"name": ["look"]}}],
    ],
)  # fmt: skip
def test_calls_of_another_form_are_refused_by_name(server, calls):  # noqa: F811
    said = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": calls}, *MESSAGES]
    answer = httpx.post(f"{server[1]}/v1/chat/completions", headers=JSON, json={"messages": said, "max_tokens": 2})
    assert answer.status_code == 400, answer.text
    assert "tool_calls" in answer.text


@pytest.mark.parametrize("arguments", ["{", "[" * 5000])
def test_calls_whose_arguments_are_no_json_are_answered(server, arguments):  # noqa: F811
    calls = [{"function": {"name": "look", "arguments": arguments}}]
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": calls}, *MESSAGES]
    answer = httpx.post(f"{server[1]}/v1/chat/completions", headers=JSON, json={"messages": messages, "max_tokens": 2})
    assert answer.status_code == 200, answer.text


def test_the_clients_own_parsing(client: openai.OpenAI):  # noqa: F811
    pydantic = pytest.importorskip("pydantic")

    class Animal(pydantic.BaseModel):
        animal: str = pydantic.Field(json_schema_extra={"maxLength": 5})
        number: int = pydantic.Field(json_schema_extra={"minimum": 0, "maximum": 9})

    answer = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, max_tokens=100, seed=1, response_format=Animal
    )
    assert 0 <= answer.choices[0].message.parsed.number <= 9


# Responses.


def flat(tool: dict) -> dict:
    return {"type": "function", "parameters": {}, **tool["function"]}


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_calls_a_function(client, engine, stream):  # noqa: F811
    asked = {"model": "tiny", "input": PROMPT, "tools": [flat(TOOLS[0])], "tool_choice": "required"}
    asked |= {"max_output_tokens": 400, "parallel_tool_calls": False, "extra_body": {"seed": 2}}
    if stream:
        events = list(client.responses.create(**asked, stream=True))
        response = events[-1].response
        assert [event.type.removeprefix("response.") for event in events] == [
            "created", "in_progress", "output_item.added", "function_call_arguments.delta",
            "function_call_arguments.done", "output_item.done", "completed",
        ]  # fmt: skip
        assert [event.sequence_number for event in events] == [*range(len(events))]
        assert events[3].delta == events[4].arguments == response.output[0].arguments
    else:
        response = client.responses.create(**asked)
    (call,) = response.output
    assert (call.type, call.name) == ("function_call", "look")
    assert json.loads(call.arguments).keys() == {"animal", "number"}
    assert response.output_text == ""
    messages = [{"role": "user", "content": PROMPT}]
    grammar = tool_grammar(TOOLS[:1], "required", False, engine.tokenizer)
    text = alone(engine, messages, seed=2, max_new_tokens=400, grammar=grammar, tools=[TOOLS[0]]).text
    assert call.arguments in text


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_in_a_form(client, engine, stream):  # noqa: F811
    form = {"type": "json_schema", "name": "animal", "schema": SCHEMA, "strict": True}
    asked = {"model": "tiny", "input": PROMPT, "text": {"format": form}, "max_output_tokens": 60}
    answer = client.responses.create(**asked, extra_body={"seed": 5}, stream=stream)
    response = list(answer)[-1].response if stream else answer
    messages = [{"role": "user", "content": PROMPT}]
    expected = alone(engine, messages, seed=5, max_new_tokens=60, grammar=Grammar.json_schema(SCHEMA)).text
    assert response.output_text == expected
    assert response.text.format.name == "animal"


def test_a_response_reads_earlier_calls(client, engine):  # noqa: F811
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"animal": "cat"}'}
    items = [
        {"role": "user", "content": PROMPT},
        call, {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "a cat"},
    ]  # fmt: skip
    response = client.responses.create(
        model="tiny",
        input=items,
        tools=[flat(TOOLS[0])],
        tool_choice="none",
        max_output_tokens=8,
        extra_body={"seed": 1},
    )
    function = {"name": "look", "arguments": call["arguments"]}
    calls = [{"id": name, "type": "function", "function": function} for name in ("c1", "c2")]
    messages = [
        items[0], {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "a cat"},
    ]  # fmt: skip
    assert response.output_text == alone(engine, messages, seed=1, max_new_tokens=8).text


def test_a_response_that_contradicts_itself_is_refused(server):  # noqa: F811
    for fields, named in (
        ({"tool_choice": "required"}, "no tools"),
        ({"tools": [flat(TOOLS[0])], "tool_choice": {"type": "function", "name": "run"}}, "run"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "strict": True, "schema": {"type": "x"}}}},
            "text.format",
        ),
    ):
        answer = httpx.post(f"{server[1]}/v1/responses", headers=JSON, json={"input": PROMPT, **fields})
        assert answer.status_code == 400, fields
        assert named in f"{answer.json()['error']}"


def test_a_grammar_that_cannot_be_followed_ends_its_own_text_only(client, engine, monkeypatch):  # noqa: F811
    asked = {"model": "tiny", "messages": MESSAGES, "seed": 5, "max_tokens": 60}
    grammar, allowed = "[a-c]{4}x", GrammarConstraint.allowed

    def lost(self, text):
        if len(text) == 2:
            raise ValueError(CANNOT_FOLLOW)
        return allowed(self, text)

    with monkeypatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setattr(GrammarConstraint, "allowed", lost)
        other = pool.submit(client.chat.completions.create, **asked)
        with pytest.raises(openai.BadRequestError, match="cannot be followed"):
            client.chat.completions.create(**asked, extra_body={"guided_regex": grammar})
        assert other.result().choices[0].message.content == alone(engine, seed=5, max_new_tokens=60).text
    answer = client.chat.completions.create(**asked, extra_body={"guided_regex": grammar})
    assert len(answer.choices[0].message.content) == 5
