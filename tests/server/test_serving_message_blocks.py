"""Reasoning, tools and formats by Anthropic's client: the blocks of an answer, and what the next turn makes of them."""

# ruff: noqa: F811  fixtures

import json

import anthropic
import pytest
from test_serving_reasoning import CALL, FORMAT, SAID, THOUGHT, engine, says  # noqa: F401

from saltus.server.messages_request import MessagesRequest
from saltus.server.translation import conversation
from tiny_server import MESSAGES, client, server  # noqa: F401

pytestmark = pytest.mark.parametrize("engine", [True], indirect=True, ids=[""])  # tags that are special tokens

TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("look", "go")]
GO, LOOK = CALL, CALL.replace('"go", "arguments": {}', '"look", "arguments": {"at": "é", "x": 0.10}')


@pytest.fixture
def claude(server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server[1], api_key="any", max_retries=0)


def ask(claude, stream: bool, **fields) -> anthropic.types.Message:
    """The message, which the client puts together itself where it is streamed."""
    body = {"temperature": 0, **fields.pop("extra_body", {})}
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 400, **fields, "extra_body": body}
    if not stream:
        return claude.messages.create(**asked)
    with claude.messages.stream(**asked) as arriving:
        return arriving.get_final_message()


def blocks_of(answer) -> list[tuple]:
    return [
        (block.type, *((block.name, block.input) if block.type == "tool_use" else [getattr(block, block.type)]))
        for block in answer.content
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_a_block_of_its_own(claude, client, says, stream):
    says(SAID)
    answer = ask(claude, stream)
    assert blocks_of(answer) == [("thinking", THOUGHT), ("text", "the cat")]
    assert answer.content[0].signature == ""
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=400)
    reasoning_tokens = chat.usage.completion_tokens_details.reasoning_tokens
    assert answer.usage.output_tokens_details.thinking_tokens == reasoning_tokens > 0
    hidden = ask(claude, stream, thinking={"type": "adaptive", "display": "omitted"})
    assert blocks_of(hidden) == [("thinking", ""), ("text", "the cat")]
    counted = [
        claude.messages.count_tokens(model="tiny", messages=[*MESSAGES, {"role": "assistant", "content": said}])
        for said in (hidden.content, answer.content, hidden.content[1:])
    ]
    assert counted[0] == counted[1] != counted[2], "the reasoning comes back in its signature"
    silent = ask(claude, stream, extra_body={"include_reasoning": False})
    assert blocks_of(silent) == [("text", "the cat")]
    cut = ask(claude, stream, max_tokens=6)
    assert (blocks_of(cut)[0][0], len(cut.content), cut.stop_reason) == ("thinking", 1, "max_tokens")
    stopped = ask(claude, stream, stop_sequences=["hm", " cat"])
    assert (blocks_of(stopped)[1], stopped.stop_sequence) == (("text", "the"), " cat")


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {}),
        ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True, "thinking": True}),
        ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, {"reasoning_effort": "none"}),
        ({"thinking": {"type": "adaptive"}, "extra_body": {"enable_thinking": False}},
         {"enable_thinking": False, "thinking": True}),
    ],
)  # fmt: skip
def test_how_much_to_think_reaches_the_template(claude, client, engine, says, monkeypatch, fields, variables):
    template = engine.tokenizer.chat_template
    shown = "".join(f"{{{{ {name} }}}}" for name in ("enable_thinking", "thinking", "reasoning_effort"))
    monkeypatch.setattr(engine.tokenizer, "chat_template", template + shown)
    says("the cat")
    asked = variables if "reasoning_effort" in variables else {"chat_template_kwargs": variables}
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3, extra_body=asked)
    usage = ask(claude, False, **fields, max_tokens=3).usage
    read, cached = usage.input_tokens, usage.cache_read_input_tokens
    assert (read, cached) == (1, chat.usage.prompt_tokens - 1), "the prompt is the same"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("speculative", [True, False])
def test_blocks_follow_on_each_other(claude, says, stream, speculative):
    says(f"<think>hm</think>the cat{GO}{LOOK}a dog{GO}")
    answer = ask(claude, stream, tools=TOOLS, extra_body={"speculative": speculative})
    assert blocks_of(answer) == [
        ("thinking", "hm"), ("text", "the cat"), ("tool_use", "go", {}), ("tool_use", "look", {"at": "é", "x": 0.1}),
        ("text", "a dog"), ("tool_use", "go", {}),
    ]  # fmt: skip
    assert answer.stop_reason == "tool_use"
    calls = [block.id for block in answer.content if block.type == "tool_use"]
    assert len(set(calls)) == 3
    assert all(one.startswith("toolu_") for one in calls)


def test_a_block_is_complete_before_the_next_one_begins(claude, says):
    says(f"<think>hm</think>the cat{LOOK}a dog")
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 400, "tools": TOOLS, "extra_body": {"temperature": 0}}
    events = list(claude.messages.create(**asked, stream=True))[1:-2]
    kinds, index = {}, -1
    for event in events:
        index += event.type == "content_block_start"
        assert event.index == index
        kinds.setdefault(index, []).append(event.delta.type if event.type == "content_block_delta" else event.type)
    deltas = [{*found[1:-1]} for found in kinds.values()]
    assert deltas == [{"thinking_delta", "signature_delta"}, {"text_delta"}, {"input_json_delta"}, {"text_delta"}]
    assert all((found[0], found[-1]) == ("content_block_start", "content_block_stop") for found in kinds.values())
    assert kinds[0].count("signature_delta") == 1
    assert events[-1].type == "content_block_stop"


@pytest.mark.parametrize("stream", [False, True])
def test_which_tools_may_be_called(claude, says, stream):
    says(f"{GO}\n{LOOK}")
    for choice, expected in (
        (None, ["go", "look"]), ({"type": "auto", "disable_parallel_tool_use": True}, ["go"]),
        ({"type": "any"}, ["go", "look"]), ({"type": "any", "disable_parallel_tool_use": True}, ["go"]),
        ({"type": "tool", "name": "go"}, ["go"]), ({"type": "none"}, []),
    ):  # fmt: skip
        answer = ask(claude, stream, tools=TOOLS, **({} if choice is None else {"tool_choice": choice}))
        assert [block.name for block in answer.content if block.type == "tool_use"] == expected, choice
        assert answer.stop_reason == ("tool_use" if expected else "end_turn")
    says("the cat")
    assert blocks_of(ask(claude, stream, tools=TOOLS)) == [("text", "the cat")]
    says(GO)
    cut = ask(claude, stream, tools=TOOLS, max_tokens=12)
    assert (blocks_of(cut), cut.stop_reason) == ([("text", "")], "max_tokens"), "half a call is neither call nor text"
    says(f"{GO} the cat")
    stopped = ask(claude, stream, tools=TOOLS, stop_sequences=["cat"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("tool_use", None), "the call is to be made"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("older", [False, True])
def test_an_answer_may_have_a_format(claude, says, stream, older):
    form = {"type": "json_schema", "schema": FORMAT["json_schema"]["schema"]}
    field = {"extra_body": {"output_format": form}} if older else {"output_config": {"format": form}}
    says('{"a": 3}')
    assert blocks_of(ask(claude, stream, **field)) == [("text", '{"a": 2}')]


def test_the_clients_own_loop_of_tools(claude, says):
    """Two turns: the model calls, the client runs the function and sends its result, and the model answers.

    The client would have the server keep the conversation, and sends all of it only since the server refuses that.
    """
    seen = []

    @anthropic.beta_tool
    def look(at: str) -> str:
        """Look at it.

        Args:
            at: what to look at
        """
        seen.append(at)
        says("<think>so</think>a dog")
        return "it is a dog"

    says(f"<think>hm</think>{CALL.replace('go', 'look').replace('{}', json.dumps({'at': 'the cat'}))}")
    runner = claude.beta.messages.tool_runner(
        model="tiny", max_tokens=400, tools=[look], messages=MESSAGES, extra_body={"temperature": 0},
        betas=["interleaved-thinking-2025-05-14"],
    )  # fmt: skip
    first, second = list(runner)
    assert seen == ["the cat"]
    assert [block.type for block in first.content] == ["thinking", "tool_use"]
    assert (second.stop_reason, second.content[-1].text) == ("end_turn", "a dog")
    read = [turn.usage.input_tokens + turn.usage.cache_read_input_tokens for turn in (first, second)]
    assert read[1] > read[0] + first.usage.output_tokens / 2, "the second turn has the first one before it"


def test_a_template_may_refuse_later_system_messages(engine, monkeypatch):
    later = "messages[1:] | selectattr('role', 'equalto', 'system') | list"
    refusal = "{% if " + later + " %}{{ raise_exception('first') }}{% endif %}"
    monkeypatch.setattr(engine.tokenizer, "chat_template", refusal + engine.tokenizer.chat_template)
    said = [*MESSAGES, {"role": "system", "content": "one tool is new"}, {"role": "assistant", "content": "the cat"}]
    body = MessagesRequest(system="be brief", messages=[*said, *MESSAGES], tools=TOOLS, max_tokens=1).as_chat()
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
    text = engine.tokenizer.decode(engine.encode(conversation(body.messages), tools=tools))
    assert text.startswith("<|system|>be brief<|end|><|user|>the cat")
    assert "<|user|>one tool is new<|end|><|assistant|>the cat" in text


def test_the_next_turn_is_that_of_chat_completions(claude, client, says):
    says("yes")
    call = {"id": "toolu_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "é"}'}}
    talk = [
        *MESSAGES, {"role": "assistant", "content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "a cat"},
    ]  # fmt: skip
    chat_tools = [
        {"type": "function", "function": {"name": tool["name"], "parameters": {"type": "object"}}} for tool in TOOLS
    ]
    chat = client.chat.completions.create(model="tiny", messages=talk, max_tokens=3, tools=chat_tools)
    used = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "é"}}
    turns = [
        *MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "hm"}, used]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "a cat"}]},
    ]  # fmt: skip
    usage = ask(claude, False, messages=turns, tools=TOOLS, max_tokens=3).usage
    read, cached = usage.input_tokens, usage.cache_read_input_tokens
    assert (read, cached) == (1, chat.usage.prompt_tokens - 1), "the prompt is the same"
