"""Conversations with tools, for templates that refuse some of it."""

import json

import pytest
from test_grammar import TOOLS

from saltus.engine.chat.tool_messages import readable_messages
from saltus.engine.encoding import PromptSettings, encode_prompt
from tiny_models import TEMPLATE, byte_tokenizer

ALTERNATING = (  # as Gemma's
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['role'] + ':' + m['content'] }}{% endfor %}"
)
SHORT_IDS = (  # as Mistral's
    "{% for m in messages %}{% for t in m['tool_calls'] or [] %}{% if t['id']|length != 9 %}"
    "{{ raise_exception('ids must have length 9') }}{% endif %}{{ t['id'] }}{% endfor %}"
    "{% if m['role'] == 'tool' and m['tool_call_id']|length != 9 %}{{ raise_exception('ids') }}{% endif %}"
    "{{ m['role'] + (m['content'] or '') }}{% endfor %}{{ tools }}"
)
SINGLE_CALLS = (  # as Llama 3's
    "{% for m in messages %}{% if m['tool_calls'] and m['tool_calls']|length != 1 %}"
    "{{ raise_exception('only single tool-calls at once') }}{% endif %}"
    "{{ m['role'] + (m['content'] or '') }}{% for t in m['tool_calls'] or [] %}{{ t['function']['name'] }}{% endfor %}"
    "{% endfor %}{{ tools }}"
)
NO_RESULTS = (  # it writes tools, and refuses results
    "{{ tools }}{% for m in messages %}{% if m['role'] not in ('user', 'assistant') %}{{ raise_exception('roles') }}"
    "{% endif %}{{ m['role'] + ':' + m['content'] + ' ' }}{% endfor %}"
)
USER = {"role": "user", "content": "?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def call(name: str, call_id: str, arguments: object = "{}") -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


ANSWER = {"role": "assistant", "content": None, "tool_calls": [call("look", "call_a"), call("wait", "call_b")]}
RESULTS = [
    {"role": "tool", "tool_call_id": "call_b", "content": "waited"},
    {"role": "tool", "tool_call_id": "call_a", "content": "a cat"},
]


@pytest.fixture
def tokenizer():
    return byte_tokenizer()


def test_a_template_without_tools_is_told_about_them_in_text(tokenizer):
    conversation = [
        USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "look", "arguments": '{"a": 0.10}'}}],
        },
        {"role": "tool", "content": "a cat"},
        {"role": "tool", "content": "a dog"},
    ]
    tokenizer.chat_template = TEMPLATE
    system, user, said, result = readable_messages(conversation, TOOLS, tokenizer)
    assert '"name": "wait"' in system["content"]
    assert user == USER
    assert said["content"] == '<tool_call>\n{"name": "look", "arguments": {"a": 0.10}}\n</tool_call>'
    texts = [f"<tool_response>\n{content}\n</tool_response>" for content in ("a cat", "a dog")]
    assert result == {"role": "user", "content": "\n".join(texts)}


@pytest.mark.parametrize("begin", [[USER], [SYSTEM, USER]])
def test_a_template_without_system_messages_reads_tools_in_the_users(tokenizer, begin):
    tokenizer.chat_template = ALTERNATING
    (user,) = readable_messages(begin, TOOLS, tokenizer)
    assert user["role"] == "user"
    assert user["content"].endswith("\n\n?")
    assert user["content"].startswith("Be brief." if SYSTEM in begin else "You can call functions.")
    assert '"name": "look"' in user["content"]


def test_results_and_what_follows_are_one_message_where_roles_must_alternate(tokenizer):
    tokenizer.chat_template = ALTERNATING
    _, answer, results = readable_messages([USER, ANSWER, *RESULTS, USER], (), tokenizer)
    assert answer["content"].count("<tool_call>") == 2
    assert results["content"].index("a cat") < results["content"].index("waited")  # no ids: in the order of the calls
    assert results["content"].endswith("\n?")
    assert readable_messages([SYSTEM, USER, ANSWER, *RESULTS], TOOLS, tokenizer)[0]["role"] == "user"


def test_results_written_without_ids_follow_the_order_of_their_calls(tokenizer):
    tokenizer.chat_template = TEMPLATE  # it knows no tools
    unknown = {"role": "tool", "tool_call_id": "call_c", "content": "unknown"}
    found = readable_messages([USER, ANSWER, unknown, *RESULTS, USER, *RESULTS], (), tokenizer)
    texts = [message["content"] for message in found]
    assert texts[1].index("look") < texts[1].index("wait")
    assert texts[2].index("a cat") < texts[2].index("waited") < texts[2].index("unknown")
    assert texts[4].index("waited") < texts[4].index("a cat")  # of no calls: as they came


def test_ids_are_as_short_as_the_template_asks_for(tokenizer):
    tokenizer.chat_template = SHORT_IDS
    _, answer, *results = readable_messages([USER, ANSWER, *RESULTS], TOOLS, tokenizer)
    ids = [one["id"] for one in answer["tool_calls"]]
    assert [result["tool_call_id"] for result in results] == ids[::-1]
    assert len(set(ids)) == 2
    assert all(len(one) == 9 and one.isalnum() and one.isascii() for one in ids)
    kept = {**ANSWER, "tool_calls": [call("look", "abcdefghi"), call("wait", "call_b")]}
    assert readable_messages([USER, kept], TOOLS, tokenizer)[1]["tool_calls"][0]["id"] == "abcdefghi"


def test_several_calls_at_once_are_written_one_by_one_where_they_must(tokenizer):
    tokenizer.chat_template = SINGLE_CALLS
    found = readable_messages([USER, ANSWER, *RESULTS], TOOLS, tokenizer)
    said = [[one["function"]["name"] for one in message.get("tool_calls", ())] for message in found]
    assert said == [[], ["wait"], [], ["look"], []]
    assert [message.get("content") for message in found[2::2]] == ["waited", "a cat"]


def test_results_are_texts_where_the_template_refuses_them(tokenizer):
    tokenizer.chat_template = NO_RESULTS
    found = readable_messages([USER, ANSWER, *RESULTS], TOOLS, tokenizer)
    assert [message["role"] for message in found] == ["user", "assistant", "user"]


def test_what_a_template_does_not_refuse_stays_as_it_is(tokenizer):
    tokenizer.chat_template = SHORT_IDS.replace("!= 9", "> 99")
    found = readable_messages([SYSTEM, USER, ANSWER, *RESULTS], TOOLS, tokenizer)
    assert [message.get("tool_call_id") for message in found[3:]] == ["call_b", "call_a"]
    assert found[2]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("template", [ALTERNATING, SHORT_IDS, SINGLE_CALLS, NO_RESULTS, TEMPLATE])
def test_each_template_gives_a_prompt(tokenizer, template):
    tokenizer.chat_template = template
    for conversation in ([USER], [USER, ANSWER, *RESULTS], [SYSTEM, USER, ANSWER, *RESULTS, USER]):
        assert encode_prompt(tokenizer, conversation, PromptSettings(tools=TOOLS), "it")


@pytest.mark.parametrize("calls", [
    5, "look", {"function": {"name": "look"}}, [5], [None], [{}], [{"id": "x"}], [{"function": None}],
    [{"id": 5, "function": {"name": "look"}}], [call("look", "a", [1])], [call("look", "a", {"x": {2}})], {}, "", 0,
    False,
])  # fmt: skip
def test_calls_of_another_form_are_refused_by_name(tokenizer, calls):
    with pytest.raises(ValueError, match=r"messages\[1\].tool_calls"):
        encode_prompt(
            tokenizer, [USER, {"role": "assistant", "content": "", "tool_calls": calls}, USER], PromptSettings(), "it"
        )


def test_numbers_beyond_the_largest_stay_json_in_the_prompt(tokenizer):
    tokenizer.chat_template = "{{ tools }}{% for m in messages %}{{ (m['tool_calls'] or []) | tojson }}{% endfor %}"
    answer = {"role": "assistant", "content": None, "tool_calls": [call("look", "a", '{"x": 1e999}')]}
    (found,) = readable_messages([answer], TOOLS, tokenizer)
    json.loads(json.dumps(found, allow_nan=False))
