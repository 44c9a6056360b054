"""Chat templates of vision models read contents as lists of parts: texts must not get lost."""

import pytest

from saltus.engine.chat.message_parts import template_reads_parts
from saltus.engine.encoding import PromptSettings, encode_prompt
from tiny_models import byte_tokenizer

PARTS = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
BOTH = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
)
TEXTS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TALK = [{"role": "system", "content": "the cat"}, {"role": "user", "content": "sat on"}]


@pytest.mark.parametrize(
    ("template", "reads_parts"), [(PARTS, True), (BOTH, False), (TEXTS, False), ("nothing", False)]
)
def test_texts_become_parts_only_where_the_template_reads_nothing_else(template, reads_parts):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    assert template_reads_parts(tokenizer, template) == reads_parts
    if template != "nothing":
        tokens = encode_prompt(tokenizer, TALK, PromptSettings(), "tiny")
        assert tokenizer.decode(tokens) == "[system]the cat[user]sat on"


@pytest.mark.parametrize("template", ["nothing", "{% for m in messages %}[{{ m.role }}]{% endfor %}"])
def test_a_template_that_leaves_the_message_out_is_named_once(template, caplog):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    for prompt in (TALK, "a dog", TALK):
        encode_prompt(tokenizer, prompt, PromptSettings(), "tiny")
    encode_prompt(tokenizer, "a dog", PromptSettings(raw=True), "tiny")
    (line,) = caplog.messages
    assert line.startswith("the chat template of tiny leaves the user's message out")
    tokenizer.chat_template = template + TEXTS
    encode_prompt(tokenizer, TALK, PromptSettings(), "tiny")
    assert len(caplog.messages) == 1, "another template, which writes it"


@pytest.mark.parametrize(
    "template",
    [
        *(TEXTS, PARTS, BOTH),
        "{{ raise_exception('a system message is needed') if messages[0].role != 'system' }}" + TEXTS,
        "{% if add_generation_prompt %}{{ messages[-1].content }}{% endif %}",
    ],
)
def test_a_template_that_writes_the_message_draws_no_line(template, caplog):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    encode_prompt(tokenizer, TALK, PromptSettings(), "tiny")
    assert not caplog.messages


def test_results_of_tools_are_not_lost_either():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = PARTS
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    talk = [TALK[1], {"role": "assistant", "content": None, "tool_calls": [call]}]
    talk.append({"role": "tool", "tool_call_id": "a", "content": "a dog"})
    assert "a dog" in tokenizer.decode(encode_prompt(tokenizer, talk, PromptSettings(), "tiny"))
