"""Calls of tools: constrained to their schemas, in ordinary tokens or special ones, and read from texts as written."""

import json

import pytest
from test_grammar import TOOLS

import saltus
from saltus.engine.chat.tool_calls import (
    HERMES,
    LLAMA,
    MISTRAL,
    ToolCall,
    ToolCallReader,
    call_markers,
    has_other_format,
    tool_format,
    tool_grammar,
)

PROMPT = "the cat sat on the mat and the cat sat on"
CALL = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def engine(tiny_folder, partners) -> saltus.Engine:
    return saltus.load(str(tiny_folder()), "lookup", options=partners, adaptive=False)


def test_an_object_that_is_no_call_of_llama_s_form_is_text():
    for text in ('{"name": "Bob", "age": 3}', '{"city": "Rome"}'):
        reader = ToolCallReader(LLAMA)
        read = [reader.read(text[:9]), reader.read(text[9:]), reader.read("", last=True)]
        assert ("".join(part for part, _ in read), [call for _, calls in read for call in calls]) == (text, [])


def test_only_known_forms_are_told_by_templates():
    for template in (
        "{{ m['tool_calls'] }}<tool_call></tool_call>",
        '{"name": "a", "parameters": {}}[x]',
        "{{ m.tool_calls }}",
    ):
        assert not has_other_format(template)
    for template in (
        "[TOOL_CALLS]",
        "x<|tool_call|>",
        "<tool_call><function=a>",
        "<｜tool▁call▁begin｜>",
        "<TOOLCALL>[",
    ):
        assert has_other_format(template)


def test_a_call_of_llama_s_form_after_white_space_follows_its_schema(engine, monkeypatch):
    monkeypatch.setattr("saltus.engine.chat.tool_calls.tool_format", lambda tokenizer: LLAMA)
    limits = tool_grammar(TOOLS[:1], "auto", True, engine.tokenizer).constraint(engine.tokenizer, frozenset([0]))
    for text in (" a {", "\n\n"):
        tokens = engine.tokenizer(text, add_special_tokens=False).input_ids
        assert limits.num_allowed([], tokens) == len(tokens)
    begun = engine.tokenizer("\n{", add_special_tokens=False).input_ids
    assert limits.num_allowed([], begun) == 1


@pytest.mark.parametrize("several", [False, True])
def test_required_calls_follow_the_schemas(engine, several):
    grammar = tool_grammar(TOOLS[:1], "required", several, engine.tokenizer)
    text = engine.generate(PROMPT, grammar=grammar, temperature=1.0, max_new_tokens=400, seed=1).text
    content, calls = ToolCallReader(HERMES).read(text, last=True)
    assert not content
    assert len(calls) == 1 or several
    for call in calls:
        assert call.name == "look"
        assert json.loads(call.arguments).keys() == {"animal", "number"}


def test_a_schema_that_cannot_be_followed_names_its_tool(engine):
    parameters = {"properties": {"x": {"type": "array", "uniqueItems": True}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "other", "parameters": parameters}}]
    tool_grammar(tools, "auto", True, engine.tokenizer).constraint(engine.tokenizer, engine.target.end_tokens)
    tools[-1]["function"]["strict"] = True
    with pytest.raises(ValueError, match=r"'other' .*uniqueItems"):
        tool_grammar(tools, "auto", True, engine.tokenizer)
    tools[-1]["function"] = {"name": "third", "parameters": {"enum": []}}
    with pytest.raises(ValueError, match="'third'"):
        tool_grammar(tools, "auto", True, engine.tokenizer)


@pytest.mark.parametrize("several", [False, True])
def test_a_text_that_need_not_call_has_calls_by_their_schemas_and_one_if_only_one_may_be(engine, several):
    constraint = tool_grammar(TOOLS[:1], "auto", several, engine.tokenizer).constraint(engine.tokenizer, frozenset([0]))
    call = '<tool_call>\n{"name": "look", "arguments": {"animal": "cat", "number": 1}}\n</tool_call>'
    allowed = {
        "hi <tool": True, "hi <tool_call>foo": False, f"hi\n{call}": True, f"{call}\n{call}": several,
        f"{call}<tool_call>": False, f"{call} and": several,
    }  # fmt: skip
    for text, expected in allowed.items():
        tokens = [*engine.tokenizer(text).input_ids, 0]
        assert (constraint.num_allowed([], tokens) == len(tokens)) == expected


@pytest.mark.parametrize("cut", [1, 2, 5, 1000])
def test_calls_are_read_wherever_the_text_is_cut(cut):
    text = (
        'I <tool> look.\n\n<tool_call>\n{"name": "look", "arguments": {"a": "</b>"}}\n</tool_call>\n'
        '<tool_call>{"name": "wait", "arguments": {}}</tool_call>\n<tool_call>no JSON</tool_call> Done <'
    )
    reader = ToolCallReader(HERMES)
    pieces = [text[start : start + cut] for start in range(0, len(text), cut)]
    found = [reader.read(piece, last=place == len(pieces) - 1) for place, piece in enumerate(pieces)]
    assert "".join(content for content, _ in found) == "I <tool> look.<tool_call>no JSON</tool_call> Done <"
    assert [call for _, calls in found for call in calls] == [ToolCall("look", '{"a": "</b>"}'), ToolCall("wait", "{}")]


@pytest.mark.parametrize("text", ["plain <b> text\n\nwith lines\n", "<tool_call> is a tag", "{}", "\n", "a <", "x <t"])
def test_text_without_calls_stays_as_it_is(text):
    for form in (HERMES, LLAMA):
        reader = ToolCallReader(form)
        found = [reader.read(letter) for letter in text]
        assert "".join(content for content, _ in [*found, reader.read("", last=True)]) == text


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("pieces", [1, 3, 1000])
def test_a_call_that_is_cut_off_is_no_text(required, pieces):
    for length in range(8, len(CALL)):
        reader, text = ToolCallReader(HERMES, required), CALL[:length]
        found = [reader.read(text[start : start + pieces]) for start in range(0, length, pieces)]
        found.append(reader.read("", last=True))
        calls = [call for _, calls in found for call in calls]
        assert "".join(content for content, _ in found) == ""
        assert calls == ([ToolCall("look", '{"a": 1}')] if CALL[:length].count("}") == 2 else [])
    for length in range(1, 20):
        assert ToolCallReader(LLAMA).read('{"name": "look", "parameters": {}}'[:length], last=True) == ("", [])
    for length in range(1, 8):
        content, _ = ToolCallReader(HERMES, required).read("<tool_call>"[:length], last=True)
        assert not (content and required)


def test_a_call_that_is_cut_off_leaves_the_text_before_it():
    assert ToolCallReader(HERMES).read("I look.\n" + CALL[:30], last=True) == ("I look.", [])
    assert ToolCallReader(HERMES).read(CALL + "\n" + CALL[:30], last=True) == ("", [ToolCall("look", '{"a": 1}')])


def test_arguments_stay_as_they_are_written():
    for written in (
        '{"x": 0.10}',
        '{"x": 1e999, "y":  -0}',
        '{"x": "\\u00e9\\ud800"}',
        "{ }",
        f'{{"x": {"1" * 5000}}}',
    ):
        text = f'<tool_call>\n{{"name": "look", "arguments": {written}}}\n</tool_call>'
        assert ToolCallReader(HERMES).read(text, last=True) == ("", [ToolCall("look", written)])


@pytest.mark.parametrize("body", ['{"name": "f", "arguments": {"x": NaN}}', '{"name": "f", "arguments": {},}', "[1]"])
def test_what_is_not_json_is_no_call(body):
    text = f"<tool_call>\n{body}\n</tool_call>"
    assert ToolCallReader(HERMES).read(text, last=True) == (text, [])


@pytest.mark.parametrize("cut", [1, 1000])
def test_arguments_may_spell_the_end_of_a_call(cut):
    arguments = '{"x": "a \\" </tool_call> </tool_call>"}'
    text = f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'
    reader = ToolCallReader(HERMES)
    found = [reader.read(text[start : start + cut]) for start in range(0, len(text), cut)]
    assert [call for _, calls in found for call in calls] == [ToolCall("look", arguments)]
    assert "".join(content for content, _ in found) == ""


def test_llamas_calls_are_whole_answers():
    reader = ToolCallReader(LLAMA)
    assert reader.read('{"name": "look", ') == ("", [])
    assert reader.read('"parameters": {"a": 1}}', last=True) == ("", [ToolCall("look", '{"a": 1}')])


@pytest.fixture(scope="module", params=["both", "begin", "end"])
def marked(request, tiny_folder, tmp_path_factory) -> saltus.Engine:
    """An engine whose markers of calls are special tokens, both or one."""
    import shutil

    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("marked") / "model"
    shutil.copytree(tiny_folder(vocab_size=320, max_position_embeddings=2048), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = {"both": ["<tool_call>", "</tool_call>"], "begin": ["<tool_call>"], "end": ["</tool_call>"]}
    tokenizer.add_special_tokens({"extra_special_tokens": names[request.param]})
    tokenizer.save_pretrained(folder)
    return saltus.load(str(folder), "lookup", adaptive=False)


def test_markers_that_are_special_tokens_are_written_and_read(marked):
    markers = call_markers(marked.tokenizer)
    assert markers
    settings = {"temperature": 1.0, "max_new_tokens": 300, "seed": 1, "tools": TOOLS[:1]}
    grammar = tool_grammar(TOOLS[:1], "required", False, marked.tokenizer)
    messages = [{"role": "user", "content": "a"}]
    found = marked.generate(messages, grammar=grammar, **settings)
    assert set(markers) <= set(found.tokens)
    content, (call,) = ToolCallReader(HERMES).read(found.text, last=True)
    assert content == ""
    assert json.loads(call.arguments).keys() == {"animal", "number"}
    assert found.tokens == marked.generate(messages, grammar=grammar, method="plain", **settings).tokens


def test_a_model_may_call_by_special_tokens_where_it_need_not(marked):
    begin = marked.tokenizer.convert_tokens_to_ids("<tool_call>")
    if begin not in call_markers(marked.tokenizer):
        pytest.skip("the begin of a call is ordinary text here")
    grammar = tool_grammar(TOOLS[:1], "auto", False, marked.tokenizer)
    allowed = grammar.constraint(marked.tokenizer, marked.target.end_tokens).allowed([])
    assert allowed[begin]
    settings = {"max_new_tokens": 300, "tools": TOOLS[:1], "logit_bias": ((begin, 50.0),)}
    found = marked.generate([{"role": "user", "content": "a"}], grammar=grammar, **settings)
    _, calls = ToolCallReader(HERMES).read(found.text, last=True)
    assert calls
    for call in calls:
        assert json.loads(call.arguments).keys() == {"animal", "number"}


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_calls_of_mistrals_form_end_with_their_object(size):
    text = 'I look.[TOOL_CALLS]look[ARGS]{"a": "}[TOOL_CALLS]", "b": 0.10}[TOOL_CALLS]wait[ARGS]{} Done'
    both = [ToolCall("look", '{"a": "}[TOOL_CALLS]", "b": 0.10}'), ToolCall("wait", "{}")]
    for cut, content, calls in ((len(text), "I look. Done", both), (30, "I look.", []), (-6, "I look.", both[:1])):
        reader, part, found = ToolCallReader(MISTRAL), text[:cut], []
        for start in range(0, len(part), size):
            found.append(reader.read(part[start : start + size], last=start + size >= len(part)))
        assert "".join(more for more, _ in found) == content
        assert [call for _, some in found for call in some] == calls


def test_mistrals_calls_follow_their_schemas(engine, monkeypatch):
    template = "{{ tools }}[TOOL_CALLS]name[ARGS]{}"
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    assert tool_format(engine.tokenizer) == MISTRAL
    assert not has_other_format(template)
    assert has_other_format("[TOOL_CALLS]name[CALL_ID]x[ARGS]{}"), "with ids, which are not read"
    call = '[TOOL_CALLS]look[ARGS]{"animal": "cat", "number": 1}'
    for choice, texts in {
        "required": {call: True, call + call: True, "[TOOL_CALLS]other[ARGS]{}": False, "hi": False},
        "auto": {"hi": True, f"hi{call}": True, "[TOOL_CALLS]look[ARGS]{}": False},
    }.items():
        constraint = tool_grammar(TOOLS[:1], choice, True, engine.tokenizer).constraint(
            engine.tokenizer, frozenset([0])
        )
        for text, expected in texts.items():
            tokens = [*engine.tokenizer(text, add_special_tokens=False).input_ids, 0]
            assert (constraint.num_allowed([], tokens) == len(tokens)) == expected, text
