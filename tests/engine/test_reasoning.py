"""Reasoning is separated from the answer however the text arrives, and a grammar begins behind it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from saltus.engine.chat.reasoning import TAGS, Reasoning, ReasoningReader, ReasoningTags, reasoning_tags
from saltus.engine.grammar import Grammar
from tiny_models import byte_tokenizer

THINK = ReasoningTags("<think>", "</think>")


def thinking_tokenizer(special=False):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in THINK], special_tokens=special)
    return tokenizer


def read(pieces, inside=False, tags=THINK):
    reader = ReasoningReader(tags, inside)
    parts = [reader.read(piece) for piece in pieces] + [reader.read("", last=True)]
    return tuple("".join(part) for part in zip(*parts, strict=True))


WHOLE = [
    ("<think>\nwhy\n\nnot?\n</think>\n\nyes <think>", False, ("why\n\nnot?", "yes <think>")),
    (" \n<think>a</think>b", False, ("a", "b")),
    ("\nwhy\n</think>\n\nyes", True, ("why", "yes")),
    ("<think>\n\n</think>\n\n{}", False, ("", "{}")),
    ("<think>no end </thin", False, ("no end </thin", "")),
    ("still thinking\n", True, ("still thinking", "")),
    (" an answer <think>x</think>", False, ("", " an answer <think>x</think>")),
    ("<thin", False, ("", "<thin")),
    ("", False, ("", "")),
    ("a < b </think>  c ", True, ("a < b", "c ")),
]


@pytest.mark.parametrize(("text", "inside", "expected"), WHOLE)
@given(cuts=st.lists(st.integers(0, 40), max_size=8))
def test_a_text_is_separated_alike_however_it_arrives(text, inside, expected, cuts):
    places = sorted({min(cut, len(text)) for cut in cuts})
    pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    assert read(pieces, inside) == read(text, inside) == read([text], inside) == expected


@pytest.mark.parametrize("tags", TAGS)
def test_the_tags_of_families_are_found_in_templates_and_vocabularies(tags):
    tokenizer = byte_tokenizer()
    assert reasoning_tags(tokenizer) is None
    tokenizer.chat_template = "{{ messages }}" + tags.end
    assert reasoning_tags(tokenizer) == tags
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.add_tokens([*tags])
    assert reasoning_tags(tokenizer) == tags
    assert read([f"{tags.begin}a{tags.end}b"], tags=tags) == ("a", "b")


@pytest.mark.parametrize(
    ("prompt", "continued", "begin"),
    [
        ("<|assistant|>", "", "tag"),
        ("<|assistant|><think>\n", "", "inside"),
        ("<|assistant|><think>\n\n</think>\n\n", "", "answer"),
        ("<|assistant|>a", "a", "answer"),
        ("<|assistant|><think>a", "<think>a", "inside"),
        ("<|assistant|><think>a</think>b", "<think>a</think>b", "answer"),
    ],
)
@pytest.mark.parametrize("special", [False, True])
def test_the_prompt_says_how_the_text_begins(prompt, continued, begin, special):
    tokenizer = thinking_tokenizer(special)
    reasoning = Reasoning(tokenizer, THINK, continued)
    tokens = tokenizer(prompt).input_ids
    assert reasoning.begin(tokens) == begin
    assert (reasoning.reader(tokens) is None) == (begin == "answer")
    text = tokenizer("ab</think>c").input_ids
    assert reasoning.count(tokens, text) == {"tag": 0, "inside": 3, "answer": 0}[begin]
    assert reasoning.count(tokens, tokenizer("<think>ab").input_ids) == {"tag": 3, "inside": 3, "answer": 0}[begin]


@pytest.mark.parametrize("tags", [THINK, TAGS[-1]])
def test_reasoning_is_counted_alike_token_by_token(tags):
    tokenizer = byte_tokenizer()
    parts = ["<think>", "</think>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>"]
    tokenizer.add_tokens([AddedToken(part, special=True, normalized=False) for part in parts], special_tokens=True)
    reasoning, prompt = Reasoning(tokenizer, tags), tokenizer("<|assistant|>").input_ids
    text, known = tokenizer(f"{tags.begin}why{tags.end}yes").input_ids, 0
    for size in range(1, len(text) + 1):
        if known in (0, size - 1):  # it has not ended
            known = reasoning.count(prompt, text[:size], known)
        assert known == reasoning.count(prompt, text[:size])
    assert known == len(text) - len("yes")


def constraint(prompt, grammar=None):
    tokenizer = thinking_tokenizer()
    ends = frozenset({tokenizer.eos_token_id})
    made = Reasoning(tokenizer, THINK).before(grammar or Grammar.choice(["yes", "no"]))
    return tokenizer, made.constraint(tokenizer, ends, tokenizer(prompt).input_ids)


def names(tokenizer, allowed):
    return {tokenizer.decode([token]) for token in np.flatnonzero(allowed)}


def test_the_grammar_begins_behind_the_reasoning():
    tokenizer, limits = constraint("<|assistant|>")
    assert names(tokenizer, limits.allowed([])) == {"y", "n", "<think>", "\n"}
    begun = tokenizer("\n<think>").input_ids
    assert names(tokenizer, limits.allowed(begun[:1])) == {"<think>"}
    assert limits.allowed(begun).sum() > 100
    text = tokenizer("<think>anything yes").input_ids
    free = limits.allowed(text)
    assert not free[tokenizer.eos_token_id]  # a text does not end in its reasoning
    assert free.sum() == len(free) - 1
    text += tokenizer("</think>").input_ids
    assert names(tokenizer, limits.allowed(text)) == {"y", "n", "\n"}
    text += tokenizer("\n").input_ids
    assert names(tokenizer, limits.allowed(text)) == {"y", "n"}
    text += tokenizer("yes").input_ids
    assert names(tokenizer, limits.allowed(text)) == {tokenizer.eos_token}
    assert limits.allowed([*text, tokenizer.eos_token_id]) is None


def test_where_the_prompt_opens_or_closes_the_reasoning_the_grammar_knows():
    tokenizer, limits = constraint("<|assistant|><think>\n")
    assert limits.allowed([]).sum() > 100
    assert names(tokenizer, limits.allowed(tokenizer("</think>").input_ids)) == {"y", "n", "\n"}
    tokenizer, limits = constraint("<|assistant|><think>\n\n</think>\n\n")
    assert names(tokenizer, limits.allowed([])) == {"y", "n"}


def test_a_line_break_that_belongs_to_the_answer_is_its_own():
    tokenizer, limits = constraint("<think>", Grammar.regex("\n{2}a"))
    text = tokenizer("x</think>\n").input_ids
    assert names(tokenizer, limits.allowed(text)) == {"\n"}
    assert names(tokenizer, limits.allowed([*text, *tokenizer("\n").input_ids])) == {"a"}


def test_channels_of_gpt_oss_are_reasoning_and_answer():
    (tags,) = (each for each in TAGS if each.answer)
    written = f"{tags.begin}why not?{tags.end}yes"
    tokenizer = byte_tokenizer()
    specials = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>"]
    tokenizer.add_tokens([AddedToken(each, special=True, normalized=False) for each in specials], special_tokens=True)
    tokenizer.chat_template = "{{ messages }}<|start|>assistant" + tags.begin
    assert reasoning_tags(tokenizer) == tags
    reasoning = Reasoning(tokenizer, tags)
    assert set(tokenizer.convert_ids_to_tokens(reasoning.shown_tokens)) == set(specials)
    text = tokenizer(written, add_special_tokens=False).input_ids
    prompt = tokenizer("<|start|>assistant", add_special_tokens=False).input_ids
    assert reasoning.count(prompt, text) == len(text) - len("yes")
    assert reasoning.count(prompt, tokenizer(f"{tags.answer}yes", add_special_tokens=False).input_ids) == 0
    ends = frozenset({tokenizer.pad_token_id})  # <|end|> ends a message alone
    limits = reasoning.before(Grammar.choice(["yes", "no"])).constraint(tokenizer, ends, prompt)
    for half, following in (
        ("", {"y", "n", "\n", "<|channel|>"}), ("<|channel|>", {"an", "f"}),
        (tags.answer, {"y", "n"}), (f"{tags.begin}hm{tags.end}", {"y", "n", "\n"}), (f"{tags.answer}y", {"e"}),
    ):  # fmt: skip
        assert names(tokenizer, limits.allowed(tokenizer(half, add_special_tokens=False).input_ids)) == following, half
    assert limits.allowed(tokenizer(f"{tags.begin}hm<|end|>", add_special_tokens=False).input_ids).sum() > 100
    drafts = tokenizer(f"{tags.begin}hm{tags.end}yes", add_special_tokens=False).input_ids
    assert limits.num_allowed([], drafts) == len(drafts)
    assert limits.num_allowed(drafts[:1], drafts[:1]) == 0


def test_reasoning_after_a_line_break_counts():
    tokenizer = thinking_tokenizer()
    text = tokenizer("\n<think>hm</think>yes").input_ids
    assert Reasoning(tokenizer, THINK).count(tokenizer("<|assistant|>").input_ids, text) == len(text) - len("yes")


@given(st.lists(st.sampled_from(["<think>", "</think>", "\n", "y", "yes", "no", "a", "<|end|>"]), max_size=9))
def test_drafts_are_allowed_one_by_one_as_together(words):
    tokenizer, limits = constraint("<|assistant|>")
    tokens = tokenizer("".join(words)).input_ids
    count = limits.num_allowed([], tokens)
    for place in range(count):
        allowed = limits.allowed(tokens[:place])
        assert allowed is None or allowed[tokens[place]]
    if count < len(tokens):
        assert not limits.allowed(tokens[:count])[tokens[count]]
    if count:
        assert limits.num_allowed(tokens[: count - 1], tokens[count - 1 :]) == 1
        for token in limits.fast_forward(tokens[:count], 4)[:1]:
            assert limits.allowed(tokens[:count])[token]


def test_tags_that_are_no_tokens_leave_a_grammar_as_it_is():
    grammar = Grammar.choice(["yes"])
    assert Reasoning(byte_tokenizer(), THINK).before(grammar) is grammar
