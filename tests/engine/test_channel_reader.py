"""Messages of gpt-oss's channels: reasoning, answer and calls, however the text is cut, and constrained."""

import json
from itertools import pairwise
from random import Random

import pytest
from tokenizers import AddedToken

from saltus.engine.chat.channel_reader import ChannelReader
from saltus.engine.chat.reasoning import TAGS, Reasoning
from saltus.engine.chat.tool_calls import ToolCallReader, call_markers, has_other_format, tool_format, tool_grammar
from saltus.engine.chat.tool_formats.gpt_oss import GPT_OSS
from saltus.engine.chat.tool_formats.tool_format import ToolCall
from saltus.engine.chat.tool_messages import readable_messages
from tiny_models import byte_tokenizer

SCHEMA = {"type": "object", "properties": {"animal": {"type": "string"}}, "required": ["animal"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("look", "see")]
TEMPLATE = (  # short, with the markers of gpt-oss's
    "{{ tools }}{% for m in messages %}{% if m.role == 'tool' %}<|start|>functions.{{ m.tool_call_id }} to=assistant"
    "<|channel|>commentary<|message|>{{ m.content }}<|end|>{% elif 'tool_calls' in m %}"
    "{% if 'x' in m.content %}{% endif %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}"
    "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
THOUGHT = "<|channel|>analysis<|message|>why not?<|end|><|start|>assistant"
CALL = ToolCall("look", '{"animal": "a \\"<|cat|>\\" \\n"}')
COMMENTARY = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
WHOLE = [
    (f"{THOUGHT}<|channel|>final<|message|>A cat.\n", ("why not?", "A cat.\n", [])),
    (f"{THOUGHT}{GPT_OSS.write([CALL])}", ("why not?", "", [CALL])),
    (f"{THOUGHT}{GPT_OSS.write([CALL])}".removesuffix("<|call|>"), ("why not?", "", [CALL])),
    (f"{THOUGHT} to=functions.look<|channel|>commentary json<|message|>{CALL.arguments}", ("why not?", "", [CALL])),
    (f" to=functions.look<|channel|>commentary <|constrain|>json<|message|>{CALL.arguments}", ("", "", [CALL])),
    (f"<|channel|>analysis to=functions.look code<|message|>{CALL.arguments}<|call|>", ("", "", [CALL])),
    (f"{THOUGHT}{COMMENTARY}{GPT_OSS.write([CALL])}", ("why not?", "I look.", [CALL])),
    (f"{COMMENTARY}{THOUGHT}<|channel|>final<|message|>Yes.", ("why not?", "I look.\nYes.", [])),
    (f"{THOUGHT}{THOUGHT}<|channel|>final<|message|>", ("why not?\nwhy not?", "", [])),
    (f"{THOUGHT}<|channel|>commentary to=functions.look <|constr", ("why not?", "", [])),
    (f'{THOUGHT}<|channel|>commentary to=functions.look<|message|>{{"anim', ("why not?", "", [])),
    ("<|channel|>analysis<|message|>no end <|en", ("no end <|en", "", [])),
    (" plain <|x|> text\n", ("", " plain <|x|> text\n", [])),
    ("<|chan", ("", "<|chan", [])),
    ("", ("", "", [])),
]


def read(pieces, inside=False) -> tuple[str, str, list[ToolCall]]:
    channels, calls = ChannelReader(inside), ToolCallReader(GPT_OSS, tools=TOOLS)
    thoughts, answers, found = "", "", []
    for place, piece in enumerate([*pieces, ""]):
        last = place == len(pieces)
        thought, text = channels.read(piece, last)
        answer, some = calls.read(text, last)
        thoughts, answers, found = thoughts + thought, answers + answer, [*found, *some]
    return thoughts, answers, found


@pytest.mark.parametrize(("text", "expected"), WHOLE)
def test_messages_are_read_wherever_the_text_is_cut(text, expected):
    assert read([text]) == read([*text]) == expected
    for place in range(len(text)):
        assert read([text[:place], text[place:]]) == expected
    for seed in range(20):
        places = [0, *sorted(Random(seed).choices(range(len(text) + 1), k=seed)), len(text)]
        assert read([text[start:end] for start, end in pairwise(places)]) == expected
    if text.startswith(THOUGHT):
        assert read([text.removeprefix("<|channel|>analysis<|message|>")], inside=True) == expected


@pytest.fixture(params=[False, True], ids=["spelled", "special"])
def tokenizer(request):
    made = byte_tokenizer()
    made.chat_template = TEMPLATE
    if request.param:
        markers = sorted({*GPT_OSS.markers, "<|call|>"} - {GPT_OSS.recipient})
        made.add_tokens([AddedToken(one, special=True, normalized=False) for one in markers], special_tokens=True)
    return made


def test_the_form_is_told_by_the_template(tokenizer):
    assert tool_format(tokenizer) == GPT_OSS
    assert not has_other_format(TEMPLATE)
    if "<|channel|>" in tokenizer.get_vocab():
        assert set(call_markers(tokenizer).values()) == GPT_OSS.markers - {GPT_OSS.recipient}


def test_a_text_is_reasoning_and_then_a_call_by_its_schema_or_an_answer(tokenizer):
    tags = next(tags for tags in TAGS if tags.answer)
    ends = frozenset({tokenizer.pad_token_id})
    prompt = tokenizer("<|start|>assistant").input_ids

    def allowed(text, choice, answer=None):
        grammar = tool_grammar(TOOLS, choice, True, tokenizer, answer)
        grammar = Reasoning(tokenizer, tags).before(grammar)
        tokens = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.pad_token_id]
        return grammar.constraint(tokenizer, ends, prompt).num_allowed([], tokens) == len(tokens)

    call = GPT_OSS.write([CALL]).removesuffix("<|call|>")
    final = "<|channel|>final<|message|>"
    for text in (call, THOUGHT + call, THOUGHT + COMMENTARY + call, THOUGHT + THOUGHT + call):
        assert allowed(text, "required")
        assert allowed(text, "auto")
    for text in (final + "A cat.", f"{THOUGHT}{final}A cat.", THOUGHT + COMMENTARY + final):
        assert allowed(text, "auto")
        assert not allowed(text, "required")
    for wrong in (
        call.replace("look", "other"), call.replace("animal", "more"), f"{THOUGHT}{call}{call}", "text", THOUGHT
    ):  # fmt: skip
        assert not allowed(wrong, "auto")
    assert allowed(THOUGHT + final + "[1]", "auto", '{"enum": [[1]]}')
    assert allowed(THOUGHT + call, "auto", '{"enum": [[1]]}')
    assert not allowed(THOUGHT + final + "no", "auto", '{"enum": [[1]]}')

    if "<|channel|>" not in tokenizer.get_vocab():
        return  # a tag of many tokens is not looked for in the prompt
    begin = "<|channel|>analysis<|message|>"
    prompt = tokenizer(f"<|start|>assistant{begin}").input_ids
    for text in (THOUGHT + call, THOUGHT + COMMENTARY + call, THOUGHT + THOUGHT + call):
        assert allowed(text.removeprefix(begin), "required"), "the prompt ends inside the first message"
    for wrong in (call, THOUGHT, "why", (THOUGHT + call).removeprefix(begin).replace("look", "other")):
        assert not allowed(wrong, "required")
    prompt = tokenizer(f"<|start|>assistant{final}").input_ids
    assert allowed("A cat.", "auto")
    assert not allowed("no", "auto", '{"enum": [[1]]}')


def test_tokens_of_a_call_are_no_reasoning(tokenizer):
    reasoning = Reasoning(tokenizer, next(tags for tags in TAGS if tags.answer))
    if "<|channel|>" not in tokenizer.get_vocab():
        pytest.skip("tokens are counted where the markers are tokens")
    inside = "<|channel|>analysis<|message|>"
    end, final = "<|end|><|start|>assistant", "<|channel|>final<|message|>"

    def count(text, prompt="<|start|>assistant"):
        prompt, tokens, known = tokenizer(prompt).input_ids, tokenizer(text, add_special_tokens=False).input_ids, 0
        for size in range(len(tokens) + 1):  # as it arrives, until something else has begun
            found = reasoning.count(prompt, tokens[:size], known)
            if found < size and known:
                break
            known = found
        assert found == reasoning.count(prompt, tokens)
        return tokenizer.decode(tokens[:found])

    call = GPT_OSS.write([CALL])
    other = call.replace("<|channel|>commentary to=functions.look", " to=functions.look<|channel|>commentary")
    for rest in (call, other, COMMENTARY + call):
        for thoughts in (THOUGHT, THOUGHT * 2):
            thought = thoughts.removesuffix("<|start|>assistant")
            assert count(thoughts + rest) == thought
            assert (
                count((thoughts + rest).removeprefix(inside), "<|start|>assistant" + inside) == thought[len(inside) :]
            )
    assert count(THOUGHT + final + "A cat.") == THOUGHT + final
    assert count(call) == count(COMMENTARY + call) == count(final + "A cat.") == ""
    assert count(f"{inside}why {end[:7]}") == f"{inside}why {end[:7]}"


def test_earlier_calls_are_written_by_fields_one_at_a_time(tokenizer):
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": '{"animal": "cat"}'}}
        for name in ("look", "see")
    ]
    answer = {"role": "assistant", "content": None, "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in ("see", "look")]
    asked = {"role": "user", "content": "?"}
    plain = {"role": "assistant", "content": "!", "tool_calls": None}
    found = readable_messages([asked, answer, *results, plain, asked], TOOLS, tokenizer)
    names = [[call["function"]["name"] for call in message.get("tool_calls", ())] for message in found]
    assert names == [[], ["see"], [], ["look"], [], [], []]
    text = tokenizer.apply_chat_template(found, tools=TOOLS, tokenize=False)
    assert json.dumps({"animal": "cat"}) in text
    assert "<|start|>assistant<|message|>!" in text
