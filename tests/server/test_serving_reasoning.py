"""A reasoning model over HTTP: think tags, whole and streamed, with tools, with a schema, and in the next turn."""

# ruff: noqa: F811  fixtures

import json
from dataclasses import replace

import httpx
import openai
import pytest
import torch
from tokenizers import AddedToken

import saltus
from saltus.server.responses import response_messages
from saltus.server.responses_request import (
    ResponsesRequest,
)
from tiny_models import byte_tokenizer, tiny_llama
from tiny_server import MESSAGES, client, server  # noqa: F401

# As Qwen3's: reasoning of earlier answers is dropped, and a variable switches it off.
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.role == 'assistant' and loop.last and m.reasoning_content %}"
    "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content }}{{ '<|end|>' }}{% endfor %}{{ tools or '' }}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{% if opens %}{{ '<think>\n' }}{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
THOUGHT = 'hm </thin {"a": 1} <tool_call>'
SAID = f"<think>\n{THOUGHT}\n</think>\n\nthe cat"
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("look", "go")]
SCHEMA = {"type": "object", "properties": {"a": {"const": 2}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.fixture(scope="module", params=[False, True], ids=["added tags", "special tags"])
def engine(request, tmp_path_factory) -> saltus.Engine:
    folder = tmp_path_factory.mktemp("reasoning")
    tokenizer = byte_tokenizer()
    tags = [AddedToken(tag, special=request.param, normalized=False) for tag in ("<think>", "</think>")]
    tokenizer.add_tokens(tags, special_tokens=request.param)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    tiny_llama(max_position_embeddings=2048).save_pretrained(folder)
    return saltus.load(str(folder), "lookup", adaptive=False)


@pytest.fixture
def says(engine, monkeypatch):
    """Lets the model write a text, where nothing forbids its tokens, and then end."""
    forward = engine.network.forward

    def say(text: str) -> None:
        script = [*engine.tokenizer(text).input_ids, engine.tokenizer.eos_token_id]

        def scripted(batch, kv_caches):
            answers = []
            for inputs, outputs in zip(batch, forward(batch, kv_caches), strict=True):
                logits = torch.zeros_like(outputs.logits)
                for row, depth in enumerate([-1, *inputs.depths]):
                    place = min(inputs.canvas.num_decided + depth + 1, len(script) - 1)
                    logits[row, script[place]] = 20.0
                answers.append(replace(outputs, logits=logits, likeliest=None))
            return answers

        monkeypatch.setattr(engine.network, "forward", scripted)

    return say


def ask(client, stream=False, **fields):
    """Reasoning, content, calls, the reason of the end, and the usage."""
    asked = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 200, **fields}
    if not stream:
        answer = client.chat.completions.create(**asked)
        choice = answer.choices[0]
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        thought = (choice.message.model_extra or {}).get("reasoning_content")
        return thought, choice.message.content, calls, choice.finish_reason, answer.usage
    thought, content, calls, reason, usage = "", "", [], None, None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            more = (choice.delta.model_extra or {}).get("reasoning_content") or ""
            assert not (more and content), "the reasoning comes first"
            thought, content = thought + more, content + (choice.delta.content or "")
            calls += [(call.function.name, call.function.arguments) for call in choice.delta.tool_calls or ()]
            reason = choice.finish_reason or reason
    return thought or None, content or None, calls, reason, usage


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_has_a_field_of_its_own(client, engine, says, stream):
    says(SAID)
    thought, content, _, reason, usage = ask(client, stream)
    assert (thought, content, reason) == (THOUGHT, "the cat", "stop")
    tokens = engine.tokenizer(SAID.partition("\n\nthe")[0]).input_ids
    assert usage.completion_tokens_details.reasoning_tokens == len(tokens)
    says(SAID.removeprefix("<think>"))  # the prompt has the tag
    opened = {"extra_body": {"chat_template_kwargs": {"opens": True}}}
    assert ask(client, stream, **opened)[:2] == (THOUGHT, "the cat")
    assert ask(client, stream, max_tokens=6, **opened)[:4] == ("hm </", None, [], "length")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "fields", "expected"),
    [
        ("the cat", {}, (None, "the cat")),
        (SAID, {"extra_body": {"include_reasoning": False}}, (None, "the cat")),
        (SAID, {"extra_body": {"reasoning_format": "none"}}, (None, SAID)),
        ("the cat", {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, (None, "the cat")),
        ("the cat", {"reasoning_effort": "none"}, (None, "the cat")),
    ],
)
def test_what_is_no_reasoning_or_should_be_none(client, says, said, fields, expected, stream):
    says(said)
    assert ask(client, stream, **fields)[:2] == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_stop_strings_are_looked_for_in_the_answer_alone(client, says, stream, n):
    for stop, said, expected in (
        ("hm", SAID, "the cat"), ("\n", SAID, "the cat"), ("\n", SAID + "\na dog", "the cat"),
        (" c", SAID, "the"), ("the", SAID, None), ("e cat", SAID, "th"), ("</think>", SAID, "the cat"),
    ):  # fmt: skip
        says(said)
        if n == 1:
            assert ask(client, stream, stop=stop)[:4] == (THOUGHT, expected, [], "stop")
        else:
            answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, stop=stop, n=2)
            assert {choice.message.content for choice in answer.choices} == {expected}
    says("<b> the cat")  # no reasoning, but its first character may begin a tag
    assert ask(client, stream, stop="<")[:2] == (None, None)
    assert ask(client, stream, stop=" cat")[:2] == (None, "<b> the")


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_that_is_not_shown_has_no_log_probabilities(client, engine, says, stream):
    says(SAID)
    asked = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "logprobs": True, "top_logprobs": 1}
    for shown in (True, False):
        answer = client.chat.completions.create(**asked, stream=stream, extra_body={"include_reasoning": shown})
        choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
        text = b"".join(bytes(entry.bytes) for entry in entries).decode()
        assert text == (SAID if shown else "\n\nthe cat")


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_begins_behind_the_reasoning(client, says, stream):
    for break_ in ("", "\n"):
        says(f'<think>\n{THOUGHT}\n</think>{break_}{{"a": 2}}')
        for speculative in (True, False):
            fields = {"response_format": FORMAT, "extra_body": {"speculative": speculative}}
            assert ask(client, stream, **fields)[:4] == (THOUGHT, '{"a": 2}', [], "stop")
    says(THOUGHT)  # and an end, which may not come: the reasoning goes on
    opened = {"extra_body": {"chat_template_kwargs": {"opens": True}}, "response_format": FORMAT}
    assert ask(client, stream, max_tokens=60, **opened)[3] == "length"
    says('{"a": 2}')
    closed = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}, "response_format": FORMAT}
    assert ask(client, stream, **closed)[:2] == (None, '{"a": 2}')


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_tools_are_called_behind_the_reasoning(client, says, stream, choice):
    call = '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>'
    says(f"<think>\n{THOUGHT}\n</think>\n{call}")
    answer = ask(client, stream, tools=TOOLS, tool_choice=choice)
    assert answer[:4] == (THOUGHT, None, [("go", "{}")], "tool_calls")


def test_of_all_tools_in_the_prompt_some_may_be_allowed(client, engine, says):
    call = '<tool_call>\n{{"name": "{}", "arguments": {{}}}}\n</tool_call>'
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "go"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    lengths = []
    for tool_choice in (choice, "required"):
        says(call.format("go"))
        *_, calls, reason, usage = ask(client, tools=TOOLS, tool_choice=tool_choice)
        assert (calls, reason) == ([("go", "{}")], "tool_calls")
        lengths.append(usage.prompt_tokens)
    assert lengths[0] == lengths[1]
    says(call.format("look"))
    assert ask(client, tools=TOOLS, tool_choice="required")[2] == [("look", "{}")]
    assert ask(client, tools=TOOLS, tool_choice=choice, max_tokens=60)[2] in ([], [("go", "{}")])
    says("the cat")
    free = {"type": "allowed_tools", "allowed_tools": {**allowed, "mode": "auto"}}
    assert ask(client, tools=TOOLS, tool_choice=free)[1:3] == ("the cat", [])
    flat = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "go"}]}
    says(call.format("go"))
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    answer = client.responses.create(model="tiny", input="?", tools=tools, tool_choice=flat, temperature=0)
    assert [item.name for item in answer.output] == ["go"]
    for wrong in ([], [{"type": "function", "function": {"name": "fly"}}]):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": wrong}}
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            ask(client, tools=TOOLS, tool_choice=choice)


def test_responses_have_an_item_of_reasoning(client, says):
    says(SAID)
    asked = {"model": "tiny", "input": MESSAGES, "temperature": 0, "reasoning": {"effort": "high"}}
    answer = client.responses.create(**asked)
    thought, message = answer.output
    assert (thought.type, thought.content[0].text, thought.status) == ("reasoning", THOUGHT, "completed")
    assert (message.content[0].text, answer.output_text, answer.status) == ("the cat", "the cat", "completed")
    assert answer.usage.output_tokens_details.reasoning_tokens > 5
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == THOUGHT
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "the cat"
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]
    done = [event.item.type for event in events if event.type == "response.output_item.done"]
    assert done == ["reasoning", "message"]
    again = [*MESSAGES, *(item.model_dump(exclude_none=True) for item in answer.output), *MESSAGES]
    assert client.responses.create(**{**asked, "input": again}).output_text == "the cat"
    says(f"<think>{THOUGHT}")
    cut = client.responses.create(**asked, max_output_tokens=9)
    assert (cut.status, cut.output_text) == ("incomplete", "")


CALL = '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("speculative", [True, False])
def test_items_of_a_response_follow_on_each_other(client, says, speculative):
    says(f"<think>hm</think>the cat{CALL}{CALL}a dog{CALL}")
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    asked = {"model": "tiny", "input": MESSAGES, "temperature": 0, "tools": tools, "max_output_tokens": 400}
    asked |= {"extra_body": {"speculative": speculative}}
    events = list(client.responses.create(**asked, stream=True))
    kinds = ["reasoning", "message", "function_call", "function_call", "message", "function_call"]
    for output in (events[-1].response.output, client.responses.create(**asked).output):
        assert [item.type for item in output] == kinds
        assert [item.content[0].text for item in output if item.type == "message"] == ["the cat", "a dog"]
        assert {item.status for item in output} == {"completed"}
        assert len({item.id for item in output}) == len(kinds)
    places = [event.output_index for event in events if hasattr(event, "output_index")]
    assert places == sorted(places), "an item is complete before the next one begins"
    done = [event.type for event in events if event.type.endswith(".done") and event.output_index == 1]
    assert done == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


def test_log_probabilities_of_a_response_are_those_of_its_texts(client, says):
    says(f"<think>hm</think>the cat {CALL}{CALL}a <dog{CALL}")
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    asked = {"model": "tiny", "input": MESSAGES, "temperature": 0, "tools": tools, "max_output_tokens": 400}
    asked["include"] = ["message.output_text.logprobs"]
    events = list(client.responses.create(**asked, stream=True))
    for output in (client.responses.create(**asked).output, events[-1].response.output):
        texts = [item.content[0] for item in output if item.type == "message"]
        assert [text.text for text in texts] == ["the cat ", "a <dog"]
        for text in texts:
            assert b"".join(bytes(one.bytes) for one in text.logprobs) == text.text.encode()


def test_items_of_one_answer_are_one_message_to_the_template():
    def call(number):
        return {"type": "function_call", "call_id": f"c{number}", "name": "go", "arguments": "{}"}

    def thought(text):
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}], "summary": []}

    said = {"role": "assistant", "content": "the cat"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "5"}
    calls = [{"id": f"c{n}", "type": "function", "function": {"name": "go", "arguments": "{}"}} for n in (1, 2)]
    for items, expected in (
        ([thought("a"), call(1), thought("b"), call(2)],
         [{"content": "", "reasoning_content": "a\nb", "tool_calls": calls}]),
        ([thought("a"), thought("b"), said], [{"content": "the cat", "reasoning_content": "a\nb"}]),
        ([call(1), thought("a"), said, call(2)],
         [{"content": "the cat", "reasoning_content": "a", "tool_calls": calls}]),
        ([said, call(1), said], [{"content": "the cat\nthe cat", "tool_calls": calls[:1]}]),
        ([thought("a")], [{"content": "", "reasoning_content": "a"}]),
        ([said, thought("a"), said], [{"content": "the cat"}, {"content": "the cat", "reasoning_content": "a"}]),
    ):  # fmt: skip
        body = ResponsesRequest(input=[*MESSAGES, *items, *MESSAGES])
        found = [message for message in response_messages(body) if message["role"] == "assistant"]
        assert found == [{"role": "assistant", **message} for message in expected]
    found = response_messages(ResponsesRequest(input=[*MESSAGES, call(1), output, said]))
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_earlier_reasoning_reaches_the_template_and_may_be_continued(server, engine, says, name):
    said = [*MESSAGES, {"role": "assistant", "content": "the", name: "hm"}]
    found = httpx.post(server[1] + "/tokenize", json={"messages": said}).json()["tokens"]
    assert engine.tokenizer.decode(found).endswith("<think>\nhm\n</think>\n\nthe")
    says(" cat")
    body = {"messages": said, "temperature": 0}
    message = httpx.post(server[1] + "/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message["content"] == " cat"
    assert "reasoning_content" not in message


def test_an_unfinished_thought_goes_on(server, says):
    says(" cat</think>yes")
    said = [*MESSAGES, {"role": "assistant", "content": "<think>the"}]
    body = {"messages": said, "temperature": 0, "stream": True}
    lines = httpx.post(server[1] + "/v1/chat/completions", json=body).text.splitlines()
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas).strip() == "cat"
    assert "".join(delta.get("content", "") for delta in deltas) == "yes"
