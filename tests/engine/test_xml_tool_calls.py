"""Calls whose arguments stand in tags: constrained to the schemas of their tools, and read as JSON."""

import json

import pytest

from saltus.engine.chat import tool_calls
from saltus.engine.chat.tool_calls import (
    HERMES,
    QWEN3_CODER,
    ToolCallReader,
    has_other_format,
    tool_format,
    tool_grammar,
)
from tiny_models import byte_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "mode": {"enum": ["read", "write"]},
        "lines": {"type": "array", "items": {"type": "integer"}},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "note": {"type": ["string", "null"]},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["path", "mode"],
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "edit", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]
TEMPLATE = "{{ tools }}<tool_call>\n<function=name>\n<parameter=a>\nb\n</parameter>\n</function>\n</tool_call>"


def call(name: str, **arguments: str) -> str:
    inner = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def read(text: str, size: int = 1000, last: bool = True) -> tuple[str, list[tuple[str, str]]]:
    reader, content, calls = ToolCallReader(QWEN3_CODER, tools=TOOLS), "", []
    for start in range(0, len(text), size):
        more, found = reader.read(text[start : start + size], last and start + size >= len(text))
        content, calls = content + more, [*calls, *((one.name, one.arguments) for one in found)]
    return content, calls


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_arguments_are_of_the_types_of_their_schemas(size):
    code = 'if x:\n    print("</tool_call>", "<parameter=y>")\n</function>'
    text = "I edit.\n" + call(
        "edit", path="5", mode="read", lines="[1, 2.50]", limit="null", note="null", place='{"x": 1}'
    )
    text += "\n" + call("edit", path=code, mode="true", limit="7", note="a\n", unknown="[1]", empty="")
    content, calls = read(text + call("stop"), size)
    assert content == "I edit."
    assert [name for name, _ in calls] == ["edit", "edit", "stop"]
    assert calls[0][1] == (
        '{"path": "5", "mode": "read", "lines": [1, 2.50], "limit": null, "note": null, "place": {"x": 1}}'
    ), "as they are written"
    wanted = {"path": code, "mode": "true", "limit": 7, "note": "a\n", "unknown": [1], "empty": ""}
    assert json.loads(calls[1][1]) == wanted
    assert calls[2][1] == "{}"


def test_a_call_on_one_line_is_read_and_what_is_none_is_text():
    text = (
        "<tool_call><function=edit><parameter=path>a b</parameter><parameter=mode>\n</parameter></function></tool_call>"
    )
    assert read(text) == ("", [("edit", '{"path": "a b", "mode": ""}')])
    for broken in ("<tool_call>\nno call\n</tool_call>", '<tool_call>{"name": "edit"}</tool_call>'):
        assert read(broken) == (broken, [])


def test_a_call_that_is_cut_off_is_neither_call_nor_text():
    whole = call("edit", path="a\n</parameter> b", mode="read")
    for length in range(9, len(whole)):
        content, calls = read("Yes.\n" + whole[:length])
        assert content == "Yes."
        assert len(calls) == whole[:length].count("</function>")
    assert json.loads(read(whole)[1][0][1])["path"] == "a\n</parameter> b"


def test_many_arguments_and_an_end_within_one_take_no_time():
    inner = {f"k{number}": "</tool_call>" for number in range(60)}
    assert len(json.loads(read(call("stop", **inner))[1][0][1])) == 60


@pytest.fixture
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def allowed(tokenizer, monkeypatch):
    """Whether a whole text may be the model's, by choice."""
    monkeypatch.setattr(tool_calls, "tool_format", lambda _: QWEN3_CODER)

    def allowed(text: str, choice="required", tools=TOOLS) -> bool:
        tokens = [*tokenizer(text, add_special_tokens=False).input_ids, 0]
        constraint = tool_grammar(tools, choice, True, tokenizer).constraint(tokenizer, frozenset([0]))
        return constraint.num_allowed([], tokens) == len(tokens)

    return allowed


def test_calls_follow_the_schemas(allowed):
    good = {"path": "a b\n\nc <x>", "mode": "write"}
    assert allowed(call("edit", **good))
    assert allowed(call("edit", **good, lines="[1, 2]", limit="null", note="", place='{"x": 1.5}'))
    assert allowed(f"{call('stop')}\n{call('stop', anything='1', more='b')}")
    for wrong in (
        {"path": "a"}, {**good, "mode": "erase"}, {**good, "lines": "[a]"}, {**good, "limit": "x"},
        {**good, "other": "1"}, {**good, "place": "{}"},
    ):  # fmt: skip
        assert not allowed(call("edit", **wrong)), wrong
    assert not allowed(call("other"))
    assert not allowed("Well. " + call("stop"))
    assert allowed("Well.\n" + call("stop"), "auto")
    assert allowed("No call at all.", "auto")
    assert not allowed("<tool_call>\nno call\n</tool_call>", "auto")


def test_a_strict_tool_with_a_limit_that_no_call_follows_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(tool_calls, "tool_format", lambda _: QWEN3_CODER)
    function = {"name": "f", "parameters": {"properties": {"a": {"type": "string", "pattern": "^x"}}}}
    tool_grammar([{"type": "function", "function": function}], "auto", True, tokenizer)
    with pytest.raises(ValueError, match=r"'f' .* follow no pattern"):
        tool_grammar([{"type": "function", "function": {**function, "strict": True}}], "auto", True, tokenizer)


def test_the_form_is_told_by_the_template(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    assert tool_format(tokenizer) == QWEN3_CODER
    assert not has_other_format(TEMPLATE)
    monkeypatch.setattr(tokenizer, "chat_template", "<tool_call>{{ tools }}</tool_call>")
    assert tool_format(tokenizer) == HERMES
    assert has_other_format("<tool_call><function=a>"), "with JSON between the tags"
