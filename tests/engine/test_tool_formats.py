"""Every form of tool calls: told by the template, read however the text is cut, and constrained to what is read."""

import json
import random
from itertools import pairwise

import pytest
from tokenizers import AddedToken

from saltus.engine.chat import tool_calls
from saltus.engine.chat.tool_calls import (
    FORMATS,
    ToolCallReader,
    call_markers,
    has_other_format,
    tool_format,
    tool_grammar,
)
from saltus.engine.chat.tool_formats import argument_schemas
from saltus.engine.chat.tool_formats.call_lists import GRANITE_3, MISTRAL_LISTS, PHI_4_MINI
from saltus.engine.chat.tool_formats.call_sections import DEEPSEEK_V3, DEEPSEEK_V3_1, KIMI_K2
from saltus.engine.chat.tool_formats.command import COMMAND
from saltus.engine.chat.tool_formats.gemma import GEMMA_4
from saltus.engine.chat.tool_formats.glm import GLM
from saltus.engine.chat.tool_formats.gpt_oss import GPT_OSS
from saltus.engine.chat.tool_formats.hermes import HERMES, PHI_4_TAGS
from saltus.engine.chat.tool_formats.invoke_tags import DEEPSEEK_V3_2, MINIMAX_M2
from saltus.engine.chat.tool_formats.llama import LLAMA
from saltus.engine.chat.tool_formats.olmo import OLMO
from saltus.engine.chat.tool_formats.qwen3_coder import QWEN3_CODER
from saltus.engine.chat.tool_formats.tool_format import ToolCall
from saltus.engine.chat.tool_messages import readable_messages
from tiny_models import byte_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "kind": {"enum": ["a", "b c"]},
        "number": {"type": "number"},
        "nested": {"type": "object", "properties": {"x": {"type": "array", "items": {"type": "string"}}}},
        "flag": {"type": ["boolean", "null"]},
    },
    "required": ["text"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "edit", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {"name": "stop.now-2", "parameters": {"properties": {}, "additionalProperties": False}},
    },
]
TEMPLATES = {
    GLM: "{{ tools }}<tool_call>name\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>\n</tool_call>",
    DEEPSEEK_V3_1: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ n }}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    DEEPSEEK_V3: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ n }}\n```json\n{}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    KIMI_K2: "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    GRANITE_3: "<|start_of_role|>write <|tool_call|> and a list of calls",
    MINIMAX_M2: "{% set begin = '<minimax:tool_call>' %}{{ tools }}{{ begin }}<invoke name=\"n\">\n"
    "<parameter name=\"k\">v</parameter>\n</invoke>{{ '</minimax:tool_call>' }}",
    DEEPSEEK_V3_2: "{% set mark = '｜DSML｜' %}{{ tools }}<{{ mark }}function_calls>\n<{{ mark }}invoke name=\"n\">\n"
    '<{{ mark }}parameter name="k" string="true">v</{{ mark }}parameter>\n</{{ mark }}invoke>\n'
    "</{{ mark }}function_calls>",
    COMMAND: '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "n", "parameters": {}}]<|END_ACTION|>',
    OLMO: "{{ '<function_calls>\n' }}n(k='v'){{ '\n</function_calls>' }}",
    GEMMA_4: "{{ '<|tool_call>call:' + n + '{' }}k:{{ '<|\"|>' + v + '<|\"|>' + '}<tool_call|>' }}",
    PHI_4_MINI: 'write functools[{"name": "n", "arguments": {}}]',
    PHI_4_TAGS: '<|tool_call|>{"name": "n", "arguments": {}}<|/tool_call|>',
    MISTRAL_LISTS: '[TOOL_CALLS][{"name": "n", "arguments": {}}]',
}
CALLS = [
    ToolCall(
        "edit", '{"text": "a \\"b\\"\\n  <x> \\\\ é 😀", "number": 1.50, "nested": {"x": ["}", "]"]}, "flag": null}'
    ),
    ToolCall("stop.now-2", "{}"),
    ToolCall("edit", '{"text": "</tool_cal", "kind": "b c"}'),
]
OWN = [form for form in (*FORMATS, HERMES) if form != GPT_OSS]  # gpt-oss's is in test_channel_reader.py
forms = pytest.mark.parametrize("form", OWN, ids=lambda form: type(form).__name__)


def read(form, pieces, tools=TOOLS) -> tuple[str, list[ToolCall]]:
    reader = ToolCallReader(form, tools=tools)
    found = [reader.read(piece) for piece in pieces]
    found.append(reader.read("", last=True))
    return "".join(text for text, _ in found), [call for _, calls in found for call in calls]


def same(calls, others) -> bool:
    """Whether calls have equal names and arguments."""
    values = [[(call.name, json.loads(call.arguments)) for call in each] for each in (calls, others)]
    return values[0] == values[1]


@pytest.mark.parametrize("form", TEMPLATES)
def test_a_form_is_told_by_the_template(form):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATES[form]
    assert tool_format(tokenizer) == form
    assert not has_other_format(TEMPLATES[form])
    assert has_other_format(TEMPLATES[form] + "<start_function_call>")


@pytest.mark.unchecked
@pytest.mark.slow
@forms
def test_calls_are_read_as_they_are_written_wherever_the_text_is_cut(form):
    calls = CALLS[:1] if form == LLAMA else CALLS
    text = form.write(calls)
    if form != LLAMA:
        text = "I look. <\n\n" + text
    expected = "" if form == LLAMA else "I look. <"
    for place in range(len(text)):
        content, found = read(form, [text[:place], text[place:]])
        assert content == expected
        assert same(found, calls)
    for seed in range(20):
        chance = random.Random(seed)
        places = [0, *sorted(chance.choices(range(len(text)), k=seed)), len(text)]
        pieces = [text[start:end] for start, end in pairwise(places)]
        assert read(form, pieces) == read(form, [text])
    assert read(form, [*text]) == read(form, [text])


@forms
def test_numbers_stay_as_they_are_written(form):
    text = form.write([ToolCall("edit", '{"number": 1}')]).replace("1", "0.10", 1)
    if "0.10" not in text or form == KIMI_K2:
        text = form.write([ToolCall("edit", '{"number": 0.10}')])
    assert "0.10" in read(form, [text])[1][0].arguments


@forms
def test_a_call_that_is_cut_off_is_neither_call_nor_text(form):
    if form == LLAMA:
        pytest.skip("its text has to begin with the call")
    first, both = form.write(CALLS[:1]), form.write(CALLS[:2])
    for length in range(len(form.begin) + len(form.section[0]), len(both)):
        content, found = read(form, ["Well.\n" + both[:length]])
        rest = content.removeprefix("Well.").strip()  # the first half of a marker is text
        assert any(marker[: len(marker) // 2].startswith(rest) for marker in (form.begin, *form.section)), content
        assert [call.name for call in found] == [call.name for call in CALLS[: len(found)]]
        assert len(found) >= (length >= len(first) and form.begin != "<|tool_call|>")


@forms
def test_text_without_calls_stays_as_it_is(form):
    for text in ("plain <b> text\n\nwith [lines] {\n", "{}", "\n", "a <", "[", "x <t", "a [T"):
        assert read(form, [*text]) == (text, [])
    if form.begin:
        text = f"{form.begin} is a marker."
        assert read(form, [*text]) in ((text, []), ("", []))


@pytest.fixture(params=[False, True], ids=["spelled", "special"])
def tokenizer(request):
    """A tokenizer by bytes, perhaps with the markers of all forms as special tokens."""
    made = byte_tokenizer()
    if request.param:
        markers = sorted(set().union(*(form.markers for form in OWN)) - {"<function=", "<parameter=", PHI_4_MINI.begin})
        made.add_tokens([AddedToken(one, special=True, normalized=False) for one in markers], special_tokens=True)
    return made


@pytest.fixture
def allowed(tokenizer, monkeypatch):
    """Whether a whole text may be the model's."""

    def allowed(form, text: str, choice="required", several=True, tools=TOOLS) -> bool:
        monkeypatch.setattr(tool_calls, "tool_format", lambda _: form)
        tokens = [*tokenizer(text, add_special_tokens=False).input_ids, 0]
        constraint = tool_grammar(tools, choice, several, tokenizer).constraint(tokenizer, frozenset([0]))
        return constraint.num_allowed([], tokens) == len(tokens)

    return allowed


@forms
def test_calls_follow_the_schemas(form, allowed):
    one, two = form.write(CALLS[:1]), form.write(CALLS)
    if form == LLAMA:
        assert allowed(form, one)
        return
    assert allowed(form, one)
    assert allowed(form, one, several=False)
    assert allowed(form, two)
    assert not allowed(form, two, several=False)
    assert not allowed(form, "Well. " + one)
    for text in (f"Well.\n{one}", f"Well.\n{two}", "No call.", one):
        assert allowed(form, text, "auto"), text
    assert not allowed(form, two, "auto", several=False)
    for wrong in (
        ToolCall("other", "{}"), ToolCall("edit", "{}"), ToolCall("edit", '{"text": "a", "kind": "d"}'),
        ToolCall("edit", '{"text": "a", "more": 1}'), ToolCall("edit", '{"text": "a", "number": "b"}'),
    ):  # fmt: skip
        assert not allowed(form, form.write([wrong])), wrong
        assert not allowed(form, f"Well. {form.write([wrong])}", "auto"), wrong


LISTS = {
    "mixed": {"enum": ["auto", "1", 2, None]},
    "typed": {"type": ["string", "null"], "enum": ["on", "off", None, 5]},
    "either": {"anyOf": [{"$ref": "#/$defs/colour"}, {"type": "null"}]},
    "named": {"$ref": "#/$defs/colour"},
    "number": {"oneOf": [{"const": "all"}, {"type": "integer", "minimum": 1}]},
    "open": {"anyOf": [{"enum": ["a"]}, {"type": "string"}]},
}


@pytest.mark.parametrize("form", [QWEN3_CODER, GLM, MINIMAX_M2, DEEPSEEK_V3_2, OLMO, HERMES, GEMMA_4])
def test_lists_of_texts_and_other_values_admit_nothing_else(form, allowed):
    colours = {"colour": {"type": "string", "enum": ["red", "blue"]}}
    parameters = {"properties": LISTS, "$defs": colours, "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for key, listed, others in (
        ("mixed", ["auto", "1", 2, None], ["aut", "", 3, True, [2]]),
        ("typed", ["on", "off", None], ["null ", 5, "o", False]),
        ("either", ["red", "blue", None], ["green", 0, "red,"]),
        ("named", ["red", "blue"], ["green", None, 1]),
        ("number", ["all", 1, 20], ["al", 0, None, "some"]),
        ("open", [] if form == OLMO else ["a", "b c"], []),  # OLMO's are JSON there, in double quotes
    ):
        for values, may in ((listed, True), (others, False)):
            for value in values:
                text = form.write([ToolCall("f", json.dumps({key: value}))])
                assert allowed(form, text, tools=tools) == may, (key, value)
        for value in listed:
            call = ToolCall("f", json.dumps({key: value}))
            reader = ToolCallReader(form, required=True, tools=tools)
            (found,) = reader.read(form.write([call]), True)[1]
            assert json.loads(found.arguments) == {key: value}, (key, value)


def test_references_that_lead_back_take_no_time():
    schema = {
        "$ref": "#/$defs/node",
        "$defs": {"node": {"anyOf": [{"$ref": "#/$defs/node"}] * 60 + [{"enum": ["a", 1]}]}},
    }
    assert argument_schemas.values_of(schema).texts == ["a"]
    assert argument_schemas.types_of(schema) == {"string", "number"}


@pytest.mark.slow
@forms
def test_what_the_grammar_admits_is_read_back(form, tokenizer, monkeypatch):
    monkeypatch.setattr(tool_calls, "tool_format", lambda _: form)
    special = {token: added.content for token, added in tokenizer.added_tokens_decoder.items()}
    constraint = tool_grammar(TOOLS, "required", True, tokenizer).constraint(tokenizer, frozenset([0]))
    texts = 0
    for seed in range(12):
        chance, tokens = random.Random(seed), []
        while len(tokens) < 300 and 0 not in tokens:
            choices = [token for token, may in enumerate(constraint.allowed(tokens)) if may]
            ends = [token for token in choices if token == 0 or chr(min(token, 126)) in '"}]' or token in special]
            tokens.append(chance.choice(ends if ends and chance.random() < 0.2 else choices))
        if 0 not in tokens:
            continue
        text = tokenizer.decode(tokens[:-1], skip_special_tokens=False)
        content, calls = read(form, [text])
        assert not content.strip(), text
        assert calls, text
        texts += 1
        for call in calls:
            assert json.loads(call.arguments).keys() <= SCHEMA["properties"].keys()
            assert ("text" in json.loads(call.arguments)) == (call.name == "edit"), text
        content, again = read(form, [form.write(calls)])
        assert same(again, calls), text
    assert texts


@pytest.mark.parametrize("form", TEMPLATES)
def test_special_tokens_that_mark_calls_are_shown(form):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATES[form]
    tokenizer.add_tokens([AddedToken(one, special=True) for one in sorted(form.markers)], special_tokens=True)
    assert set(call_markers(tokenizer).values()) == form.markers


ASKED = [{"role": "user", "content": "?"}]
ANSWER = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "call_a", "type": "function", "function": {"name": "edit", "arguments": '{"text": "a"}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "call_a", "content": "done"}


def test_arguments_are_texts_and_tools_in_a_system_message_where_a_template_reads_no_others():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (  # as DeepSeek's
        "{% for m in messages %}{% if m['tool_calls'] %}<｜tool▁calls▁begin｜>{% for t in m['tool_calls'] %}"
        "{{ '<｜tool▁call▁begin｜>' + t['function']['name'] + '<｜tool▁sep｜>' + t['function']['arguments'] }}"
        "<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    system, _, answer, result = readable_messages([*ASKED, ANSWER, RESULT], TOOLS, tokenizer)
    assert DEEPSEEK_V3_1.write([ToolCall("the name", '{"an argument": "its value"}')]) in system["content"]
    assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {"text": "a"}
    assert result == RESULT
    text = tokenizer.apply_chat_template(readable_messages([*ASKED, ANSWER, RESULT], TOOLS, tokenizer), tokenize=False)
    assert read(DEEPSEEK_V3_1, [text])[1][-1] == ToolCall("edit", '{"text": "a"}')


def test_ids_are_those_of_the_form():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{{ tools }}<|tool_calls_section_end|>{% for m in messages %}{{ m['content'] }}"
        "{% for t in m['tool_calls'] or [] %}<|tool_calls_section_begin|><|tool_call_begin|>{{ t['id'] }}"
        "<|tool_call_argument_begin|>"
        "{{ t['function']['arguments'] | tojson }}<|tool_call_end|>{% endfor %}{% endfor %}"
    )
    found = readable_messages([*ASKED, ANSWER, RESULT, ANSWER, RESULT], TOOLS, tokenizer)
    assert [message["tool_calls"][0]["id"] for message in found[1::2]] == ["functions.edit:0", "functions.edit:1"]
    assert [message["tool_call_id"] for message in found[2::2]] == ["functions.edit:0", "functions.edit:1"]


def test_calls_are_texts_of_the_own_form_where_a_template_does_not_write_them():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (  # as Granite 3's
        "<|start_of_role|>{{ tools }} <|tool_call|>"
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}{% endfor %}"
    )
    _, answer, result = readable_messages([*ASKED, ANSWER, RESULT], TOOLS, tokenizer)
    assert answer["content"] == '<|tool_call|>[{"name": "edit", "arguments": {"text": "a"}}]'
    assert result["role"] == "user"


@forms
def test_a_call_is_not_read_anew_for_each_piece(form, monkeypatch):
    lengths, one = [], type(form).read
    monkeypatch.setattr(
        type(form), "read", lambda form, text, *rest: lengths.append(len(text)) or one(form, text, *rest)
    )
    value = ['a \\ " } ]{[' * 40, "</b>"]
    call = ToolCall("edit", json.dumps({"text": "{" * 50, "nested": {"x": value, "y": [{}, {"z": []}] * 20}}))
    text = form.write([call])
    _, (found,) = read(form, [*text])
    assert same([found], [call])
    assert len(lengths) <= 3
    assert sum(lengths) <= 3 * len(text)


def test_tags_say_which_arguments_are_texts():
    texts = {"text": "[1]", "kind": "null", "flag": None, "unknown": 2}
    written = DEEPSEEK_V3_2.write([ToolCall("edit", json.dumps(texts))])
    assert written.count('string="true"') == 2
    _, (call,) = read(DEEPSEEK_V3_2, [written])
    assert json.loads(call.arguments) == texts


def test_pythons_arguments_are_json_or_in_single_quotes(allowed):
    first = """edit(text='it\\'s "a"\\n', number=0.10, nested={"x": [")"]})"""
    text = f"<function_calls>{first}\nstop.now-2()</function_calls>"
    _, (first, second) = read(OLMO, [text])
    assert first.arguments == '{"text": "it\'s \\"a\\"\\n", "number": 0.10, "nested": {"x": [")"]}}'
    assert second == CALLS[1]
    assert allowed(OLMO, text)
    assert allowed(OLMO, text.replace("number=0.10, ", ""))
    assert allowed(OLMO, "<function_calls>edit(text=\"a\", kind='b c')</function_calls>")
    for wrong in (
        "edit()",
        "edit(text='a', kind='c')",
        "edit(kind='a')",
        "edit(text='a' number=1)",
        "edit(text='a\nb')",
    ):
        assert not allowed(OLMO, f"<function_calls>{wrong}</function_calls>"), wrong


def test_an_answer_may_stand_between_markers_that_are_tokens(allowed, tokenizer):
    names = list(COMMAND.answer_markers)
    tokenizer.add_tokens([AddedToken(one, special=True, normalized=False) for one in names], special_tokens=True)
    begin, end = names
    for text in (f"{begin}No.{end}", f"{begin}No.", "No.", f"{begin}{end}"):
        assert allowed(COMMAND, text, "auto"), text
        assert not allowed(COMMAND, text), text
    assert not allowed(COMMAND, f"No.{end}{COMMAND.write(CALLS)}", "auto")
    assert not set(names) & set(call_markers(tokenizer).values()), "they are not shown"


def test_values_between_quotes_of_their_own_follow_their_schemas(allowed):
    properties = {
        "b": {"type": "array", "items": {"type": "integer", "maximum": 9}, "minItems": 1, "maxItems": 2},
        "A": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
        "c": {"type": "object", "additionalProperties": {"type": "boolean"}},
        "d": {"enum": [1, "x", [None, "y"]]},
        "e": {},
    }
    node = {"type": "object", "properties": {"of": {"$ref": "#/$defs/node"}, "name": {"type": "string"}}}
    parameters = {"properties": properties, "$defs": {"node": node}, "required": ["b"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    quote = '<|"|>'
    for arguments, expected in (
        ("b:[1]", True), ("b:[1,2]", True), ("b:[]", False), ("b:[1,2,3]", False), ("b:[10]", False), ("", False),
        ("A:null,b:[1]", True), ("b:[1],A:null", False), ("A:{},b:[1]", True), ("A:{name:1},b:[1]", False),
        (f"A:{{name:{quote}, }}{quote},of:{{of:{{}}}}}},b:[1]", True), ("b:[1],c:{x:true,y:false}", True),
        ("b:[1],c:{x:1}", False), (f"b:[1],d:[null,{quote}y{quote}]", True), ("b:[1],d:1", True), ("b:[1],d:x", False),
        (f"b:[1],e:[{quote}{quote},-1.5e3,{{k:true}}]", True), ("b:[1],f:1", False),
    ):  # fmt: skip
        text = f"{GEMMA_4.begin}f{{{arguments}}}{GEMMA_4.end}"
        assert allowed(GEMMA_4, text, tools=tools) == expected, arguments
        if expected:
            _, (call,) = read(GEMMA_4, [text])
            assert json.loads(call.arguments)["b"]
    strict = {"name": "f", "strict": True, "parameters": {"properties": {"a": {"items": {"minLength": 1}}}}}
    with pytest.raises(ValueError, match=r"'f' .* follow no minLength"):
        allowed(GEMMA_4, "", tools=[{"type": "function", "function": strict}])
