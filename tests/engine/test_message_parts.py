"""Chat templates of vision models read contents as lists of parts: texts must not get lost."""

import pytest

from conftest import byte_tokenizer
from saltus.engine.encoding import PromptSettings, encode_prompt
from saltus.engine.message_parts import template_reads_parts

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


def test_results_of_tools_are_not_lost_either():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = PARTS
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    talk = [TALK[1], {"role": "assistant", "content": None, "tool_calls": [call]}]
    talk.append({"role": "tool", "tool_call_id": "a", "content": "a dog"})
    assert "a dog" in tokenizer.decode(encode_prompt(tokenizer, talk, PromptSettings(), "tiny"))
