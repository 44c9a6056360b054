"""Texts that follow a grammar: the same with every method, complete, and with forced tokens drafted."""

import json
import re

import llguidance
import numpy as np
import pytest
import torch

import saltus
import saltus.engine.grammar as grammars
from saltus.core.constraint import FAST_FORWARD_PROBABILITY, SOURCE, constrained_branches, restricted
from saltus.core.tree import Branch
from saltus.engine.grammar import BYTES_PER_TOKEN, Grammar

PROMPT = "the cat sat on the mat and the cat sat on"
SCHEMA = {
    "type": "object",
    "properties": {"animal": {"enum": ["cat", "dog"]}, "number": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["animal", "number"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": (Grammar.json_schema(SCHEMA), lambda text: json.loads(text).keys() == {"animal", "number"}),
    "regex": (Grammar.regex("[0-9]{4}-[a-c]{2}"), lambda text: re.fullmatch("[0-9]{4}-[a-c]{2}", text)),
    "choice": (Grammar.choice(["the cat", 'a "dog"']), lambda text: text in ("the cat", 'a "dog"')),
    "lark": (Grammar.lark('start: "a" start | "b"'), lambda text: re.fullmatch("a*b?", text)),
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "wait", "description": "Do nothing."}},
]


@pytest.fixture(scope="module")
def engine(tiny_folder, partners) -> saltus.Engine:
    return saltus.load(str(tiny_folder()), "lookup", options=partners, adaptive=False)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "T=1"])
@pytest.mark.parametrize("name", GRAMMARS)
def test_every_method_writes_the_same_complete_text(engine, name, temperature):
    grammar, is_complete = GRAMMARS[name]
    settings = {"grammar": grammar, "temperature": temperature, "max_new_tokens": 60, "seed": 2}
    expected = engine.generate(PROMPT, method="plain", **settings)
    assert is_complete(expected.text)
    assert expected.finish_reason == "stop" or name == "lark"
    for method in ("lookup", "jacobi", "small_model", "small_model+lookup"):
        assert engine.generate(PROMPT, method=method, **settings).tokens == expected.tokens
    if name != "lark":
        assert engine.generate(PROMPT, method="lookup", **settings).statistics.calls < expected.statistics.calls


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_least_length_leaves_a_grammar_its_only_end_and_forbids_others(engine, temperature):
    settings = {"temperature": temperature, "seed": 2, "max_new_tokens": 40, "min_new_tokens": 12}
    for method in ("plain", "lookup", "jacobi"):
        short = engine.generate(PROMPT, grammar=Grammar.choice(["the cat"]), method=method, **settings)
        assert (short.text, short.finish_reason) == ("the cat", "stop")
        long = engine.generate(PROMPT, grammar=Grammar.regex("[ab]*"), method=method, **settings)
        assert long.tokens == engine.generate(PROMPT, grammar=Grammar.regex("[ab]*"), method="plain", **settings).tokens
        assert len(long.tokens) > 12


def test_texts_of_a_batch_have_grammars_of_their_own(engine):
    settings = {"grammar": GRAMMARS["schema"][0], "temperature": 1.0, "max_new_tokens": 60}
    prompts = [PROMPT, "a dog", "the mat"]
    assert [one.tokens for one in engine.generate(prompts, **settings)] == [
        engine.generate(prompt, method="plain", **settings).tokens for prompt in prompts
    ]


def test_by_rejection_texts_are_complete(tiny_folder, partners):
    engine = saltus.load(str(tiny_folder()), "small_model", options=partners, rule="reject")
    for seed in range(3):
        found = engine.generate(PROMPT, grammar=GRAMMARS["schema"][0], temperature=1.0, max_new_tokens=60, seed=seed)
        assert GRAMMARS["schema"][1](found.text)


def test_a_constraint_depends_on_the_text_alone(engine):
    """Asked in any order, also about texts that it forbids and about ended ones."""
    end = engine.target.end_tokens
    tokens = engine.tokenizer('{"animal": "dog", "number": 12}', add_special_tokens=False).input_ids
    constraint = GRAMMARS["schema"][0].constraint(engine.tokenizer, end)
    for count in [5, 2, len(tokens), 0, 7]:
        fresh = GRAMMARS["schema"][0].constraint(engine.tokenizer, end)
        np.testing.assert_array_equal(constraint.allowed(tokens[:count]), fresh.allowed(tokens[:count]))
        assert constraint.fast_forward(tokens[:count], 64) == fresh.fast_forward(tokens[:count], 64)
        assert constraint.num_allowed(tokens[:count], tokens[count:]) == len(tokens) - count
        with pytest.raises(ValueError, match="the grammar cannot be followed"):
            constraint.allowed([tokens[-1], *tokens[:count]])
        assert constraint.num_allowed(tokens[:count], [tokens[0]]) == (count == 0)
    assert set(np.flatnonzero(constraint.allowed(tokens))) == set(end)
    assert constraint.fast_forward(tokens, 1) == [min(end)]
    assert constraint.allowed([*tokens, min(end)]) is None


def test_a_wrong_guess_that_the_grammar_cannot_follow_ends_no_text(engine):
    """By bans: after "a" only "x" may follow, in a guess that the text does not take, and "ax" was written before."""
    grammar = Grammar.regex("[a-h](x|[ab]x|[c-w]{3,9})")
    settings = {"raw": True, "grammar": grammar, "temperature": 1.0, "no_repeat_ngram_size": 2, "max_new_tokens": 12}
    for prompt in ("ax ax ax ax", "bxbx"):
        for seed in range(3):
            plain = engine.generate(prompt, method="plain", seed=seed, **settings)
            assert engine.generate(prompt, method="jacobi", seed=seed, **settings).tokens == plain.tokens


@pytest.mark.parametrize("method", ["plain", "lookup", "jacobi"])
def test_tokens_that_the_tokenizer_lacks_end_drafts_and_no_text(engine, method):
    """Published models have more of them than their tokenizers: rows that fill the embeddings up."""
    assert len(engine.tokenizer) < 297 < engine.target.num_token_ids
    settings = {"grammar": GRAMMARS["regex"][0], "max_new_tokens": 20}
    expected = engine.generate([297, 298, 299] * 3, method="plain", **settings)
    assert engine.generate([297, 298, 299] * 3, method=method, **settings).tokens == expected.tokens
    stopped = engine.generate([297, 298, 299] * 3, method=method, stop_token_ids=[297], **settings)
    assert stopped.tokens == expected.tokens
    known = engine.tokenizer("1", add_special_tokens=False).input_ids
    constraint = settings["grammar"].constraint(engine.tokenizer, engine.target.end_tokens)
    assert constraint.num_allowed([], [*known, 299, *known]) == 1
    assert constraint.num_allowed([], [299]) == 0


def test_drafts_that_use_up_a_limit_of_the_grammar_end_no_text(engine, monkeypatch):
    """They are allowed, but not what the text takes: that is all a."""
    letter = engine.tokenizer("a", add_special_tokens=False).input_ids
    draft = engine.tokenizer("bxaxbxcxxxaxaxaxaxxaxaxxaxxaxxaxxaxxaxxaxxaaxaaxaaax", add_special_tokens=False).input_ids
    pattern = "a{3,40}|b([a-z]{0,30}x[a-z]{0,30}){3}"

    def constraint_within(limit):
        monkeypatch.setattr(grammars, "grammar_limits", lambda: llguidance.LLParserLimits(max_lexer_states=limit))
        grammars._compile.cache_clear()
        return Grammar.regex(pattern).constraint(engine.tokenizer, engine.target.end_tokens)

    def suffices(limit):
        constraint = constraint_within(limit)
        used = constraint.matcher
        try:
            return (
                all(constraint.allowed(letter * count) is not None for count in range(21))
                and constraint.matcher is used
            )
        except ValueError:
            return False

    expected = [constraint_within(250_000).allowed(letter * count) for count in range(21)]
    constraint = constraint_within(next(limit for limit in range(20, 400, 4) if suffices(limit)))
    used = constraint.matcher
    for count, mask in enumerate(expected):
        constraint.num_allowed(letter * count if count < 3 else [], draft)
        constraint.fast_forward(draft[:9], 4)
        np.testing.assert_array_equal(constraint.allowed(letter * count), mask)
    assert constraint.matcher is not used, "it has come to the limit"
    settings = {"grammar": Grammar.regex(pattern), "max_new_tokens": 20, "logit_bias": ((letter[0], 50.0),)}
    prompt = [*draft, *letter * 3, *draft]
    plain = engine.generate(prompt, method="plain", **settings)
    assert plain.text == "a" * 20
    for method in ("lookup", "jacobi"):
        assert engine.generate(prompt, method=method, **settings).tokens == plain.tokens
    grammars._compile.cache_clear()


class _OnlyAscending:
    """The next token is greater than the last; 7 is forced after 5."""

    def allowed(self, text):
        return np.arange(10) > (text[-1] if len(text) else -1)

    def num_allowed(self, text, tokens):
        chain = [*text[-1:], *tokens]
        falls = [place for place in range(1, len(chain)) if chain[place] <= chain[place - 1]]
        return (falls[0] if falls else len(chain)) - len(text[-1:])

    def fast_forward(self, text, max_tokens):
        return [7][:max_tokens] if len(text) and text[-1] == 5 else []


def test_branches_end_before_what_is_forbidden_and_go_on_with_what_is_forced():
    branches = [Branch([3, 5], [0.5, 0.4], "a"), Branch([4, 4, 6], [0.3, 0.2, 0.1], "b"), Branch([1], [0.9], "c")]
    found = constrained_branches(branches, _OnlyAscending(), [2], 3)
    assert [list(one.tokens) for one in found] == [[3, 5], [4], [], [3, 5, 7]]
    assert (found[3].source, list(found[3].acceptance_probabilities)) == (SOURCE, [0.0, 0.0, FAST_FORWARD_PROBABILITY])
    assert [list(one.tokens) for one in constrained_branches([], _OnlyAscending(), [5], 1)] == [[7]]
    assert [list(one.tokens) for one in constrained_branches(branches, _OnlyAscending(), [2], 2)] == [[3, 5], [4], []]


class _CountingTokenizer:
    """A grammar's tokenizer that counts the bytes that it reads."""

    def __init__(self, tokenizer):
        self.tokenizer, self.num_bytes, self.vocab_size = tokenizer, 0, tokenizer.vocab_size

    def tokenize_bytes(self, text):
        self.num_bytes += len(text)
        return self.tokenizer.tokenize_bytes(text)


@pytest.mark.parametrize("letters", ["the cat sat ", "\N{GRINNING FACE} ", "the"])
def test_only_as_much_of_what_is_forced_is_read_as_a_call_verifies(engine, letters):
    text = letters * (3000 // len(letters))
    constraint = Grammar.choice([text]).constraint(engine.tokenizer, engine.target.end_tokens)
    usual = constraint.fast_forward([], 10_000)
    assert engine.tokenizer.decode(usual[:-1]) == text
    constraint.tokenizer = _CountingTokenizer(constraint.tokenizer)
    for max_tokens in (1, 2, 7, 16):
        assert constraint.fast_forward([], max_tokens) == usual[:max_tokens]
    assert constraint.tokenizer.num_bytes <= (1 + 2 + 7 + 16) * BYTES_PER_TOKEN
    assert constraint.fast_forward(usual[:-3], 16) == usual[-3:]


def test_restricted_logits_keep_what_is_allowed_and_nothing_beyond_the_vocabulary():
    row = torch.arange(6.0)
    found = restricted(row, np.array([True, False, True, False]))
    assert found.tolist() == [0.0, -np.inf, 2.0, -np.inf, -np.inf, -np.inf]
    assert restricted(row, None) is row
    with pytest.raises(ValueError, match="none of the model's tokens"):
        restricted(row, np.array([False] * 6 + [True]))


class _Vanishing:
    """A constraint that cannot follow its own text after a token."""

    def allowed(self, text):
        if text:
            raise ValueError("the grammar cannot be followed")
        return None

    def num_allowed(self, text, tokens):
        return 0

    def fast_forward(self, text, max_tokens):
        return ()


def test_a_grammar_that_cannot_be_followed_is_an_error(engine, monkeypatch):
    monkeypatch.setattr(Grammar, "constraint", lambda *_: _Vanishing())
    with pytest.raises(ValueError, match="cannot be followed"):
        engine.generate(PROMPT, grammar=Grammar.regex("a*"), max_new_tokens=4)


@pytest.mark.parametrize("method", ["plain", "lookup", "jacobi"])
@pytest.mark.parametrize("make", [
    lambda text: (Grammar.json_schema({"const": text}), json.dumps(text)),
    lambda text: (Grammar.choice([text]), text),
    lambda text: (Grammar.regex(re.escape(text) + "y"), text + "y"),
])  # fmt: skip
def test_a_literal_may_spell_a_special_token(engine, make, method):
    special = engine.tokenizer.convert_ids_to_tokens(min(engine.target.end_tokens))
    grammar, expected = make(f"a{special}")
    found = engine.generate(PROMPT, grammar=grammar, max_new_tokens=60, method=method)
    assert (found.text, found.finish_reason) == (expected, "stop")
    assert not set(found.tokens[:-1]) & set(engine.tokenizer.all_special_ids)


@pytest.mark.model
def test_literals_of_the_default_model_may_spell_special_tokens():
    engine = saltus.load()
    for text in ("a<|im_start|>b", "<|im_end|>", "say <repo_name>"):
        found = engine.generate("Answer.", grammar=Grammar.json_schema({"const": text}), max_new_tokens=40)
        assert (json.loads(found.text), found.finish_reason) == (text, "stop")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grammar.json_schema({"type": "nonsense"}), lambda: Grammar.json_schema("{"),
        lambda: Grammar.regex("("), lambda: Grammar.choice([]), lambda: Grammar.lark("start: what"),
        lambda: Grammar.regex("a" * 300_000),
    ],
)  # fmt: skip
def test_what_is_no_grammar_is_refused_in_one_line(engine, make):
    with pytest.raises(ValueError, match=r"JSON schema|grammar|choice") as error:
        engine.generate(PROMPT, grammar=make(), max_new_tokens=4)
    assert "\n" not in str(error.value)


def test_a_short_grammar_of_a_long_text_takes_little_work(engine):
    end = engine.target.end_tokens
    endless = Grammar.regex("(a{1000}){1000}").constraint(engine.tokenizer, end)
    assert len(endless.matcher.compute_ff_bytes()) < 150_000
    assert len(endless.fast_forward([], 8)) == 8
    words = [f"{number:05} the cat sat on the mat" for number in range(3000)]
    choice = Grammar.choice(words).constraint(engine.tokenizer, end)
    assert choice.num_allowed([], tokens := engine.tokenizer(words[-1]).input_ids) == len(tokens)


@pytest.mark.parametrize("method", ["plain", "lookup"])
def test_a_stop_token_ends_a_complete_text_alone_and_an_error_names_one_that_a_grammar_needs(engine, method):
    (letter,) = engine.tokenizer("a", add_special_tokens=False).input_ids
    settings = {"method": method, "max_new_tokens": 12, "stop_token_ids": [letter]}
    ended = engine.generate(PROMPT, grammar=Grammar.regex("(b|ca?){4}"), logit_bias={letter: 100}, **settings)
    assert (ended.tokens[-1], ended.finish_reason) == (letter, "stop")
    assert re.fullmatch("[bc]{4}", ended.text)
    with pytest.raises(ValueError, match=rf"cannot be followed: .*, or leave {letter} out of stop_token_ids: they end"):
        engine.generate(PROMPT, grammar=Grammar.regex("bab"), **settings)


def test_a_grammar_needs_an_end(engine):
    with pytest.raises(ValueError, match="contradict"):
        engine.generate(PROMPT, grammar=GRAMMARS["choice"][0], ignore_eos=True)
    with pytest.raises(ValueError, match="no token ends it; give stop_token_ids"):
        GRAMMARS["choice"][0].constraint(engine.tokenizer, frozenset({297}))


def test_other_end_tokens_do_not_have_the_vocabulary_read_again(engine, monkeypatch):
    grammar, made, make = Grammar.regex("a*"), [], llguidance.LLTokenizer
    grammar.constraint(engine.tokenizer, frozenset({0, 5}))
    monkeypatch.setattr(llguidance, "LLTokenizer", lambda *given, **more: made.append(make(*given, **more)) or made[-1])
    constraint = grammar.constraint(engine.tokenizer, frozenset({0, 6}))
    assert [tokenizer.eos_tokens for tokenizer in made] == [[0, 6]]
    assert constraint.allowed([])[[0, 5, 6]].tolist() == [True, False, True]
