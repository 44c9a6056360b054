"""Grammars in llama.cpp's GBNF: which texts follow them, and what is refused."""

import re
import time

import pytest

import saltus
from saltus.engine.gbnf import MAX_DEPTH, gbnf_to_lark
from saltus.engine.grammar import Grammar

JSON = r"""
root   ::= object  # a comment
value  ::= object | string | [0-9]+ | ("true" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws
    value)* )? "}" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
ws ::= | " " |
    "\n" [ \t]{0,20}
"""
TEXTS = [  # a grammar, texts that follow it, and texts that do not
    ('root ::= word "s"\nword ::= [a-z]+', ["cats", "ss"], ["s", "cat"]),
    ('root ::= ("a" | "ab") "b"', ["ab", "abb"], ["a", "abbb"]),
    ('root ::= fooBar foo-bar start FOO_BAR\nfooBar::="a"\nfoo-bar::="b"\nstart::="c"\nFOO_BAR::="d"', ["abcd"], []),
    ('root ::= "a" root | "b"', ["b", "aab"], ["a"]),
    ('x ::= "b"\r\nx ::= "a"\r\nroot ::= x x\r\n', ["aa"], ["bb"]),
    ("root ::= .{2}", ["a\n", "é😀"], ["a", "abc"]),
    ("root ::= [^\\n]+", ["a/é"], ["a\n", ""]),
    (r'root ::= "\u00e9" [\U0001F600-\U0001F64F] "\x41\t\\\""', ['é😀A\t\\"'], ["e😀A"]),
    ("root ::= [a&&b]+", ["&", "ab&"], ["c"]),
    ("root ::= [!--]", ["!", "+", "-"], ["."]),
    ("root ::= [-a^/$]+", ["-a^/$"], ["b"]),
    (r"root ::= [\]\[]+", ["[]"], ["\\"]),
    ('root ::= (("a"? | "b")* "c"){2,3}', ["cc", "abcac"], ["c"]),
    ('root ::= ( | "a"\n) "b"{2} "c"{0} "d"{0,0} "" |', ["", "bb", "abb"], ["bbc", "b"]),
    (JSON, ['{"a": {"\\u00e9b": 12,\n  "c":null}}', "{ }"], ['{"a"}', '{"a": "\n"}']),
]


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    return saltus.load(str(tiny_folder()), "plain").tokenizer


@pytest.mark.parametrize(("grammar", "texts", "others"), TEXTS, ids=range(len(TEXTS)))
def test_a_text_follows_the_rules(tokenizer, grammar, texts, others):
    end = tokenizer.eos_token_id
    for text, follows in [(text, True) for text in texts] + [(text, False) for text in others]:
        tokens = [*tokenizer(text, add_special_tokens=False).input_ids, end]
        constraint = Grammar.gbnf(grammar).constraint(tokenizer, frozenset({end}))
        assert (constraint.num_allowed([], tokens) == len(tokens)) == follows, text


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("root ::= other", "line 1: there is no rule 'other'"),
        ('other ::= "a"', "no rule is called root"),
        (" # nothing", "no rule is called root"),
        ("root", "the rule 'root' is not complete"),
        ('root ::= ("a"', "the rule 'root' is not complete"),
        ('root ::=\n"a"\n"b"', "line 3: '\"b\"' stands where a rule"),
        ("root ::= )", "line 1: ')' has nothing"),
        ('root ::= * "a"', "repeats nothing"),
        ('root ::= "a"**', "repeats nothing"),
        ('root ::= "a', "cannot be read"),
        ("root ::= <[5]>", "cannot be read"),
        ('root ::= "\\', "cannot be read"),
        (r"root ::= [\d]", "begins with no escape"),
        (r'root ::= "\uD800"', "no character of Unicode"),
        (r'root ::= "\U00110000"', "no character of Unicode"),
        ("root ::= []", "has no characters"),
        ("root ::= [z-a]", "ends before it begins"),
        ("root ::= " + "(" * 10**5, f"more than {MAX_DEPTH} in each other"),
    ],
)
def test_what_is_no_gbnf_is_refused_in_one_line(grammar, message):
    with pytest.raises(ValueError, match=f"not in llama.cpp's GBNF: .*{re.escape(message)}") as refusal:
        Grammar.gbnf(grammar)
    assert "\n" not in str(refusal.value)


def test_long_grammars_are_translated_in_a_time_of_their_length():
    rules = 10**4
    grammar = "\n".join(f"r{number} ::= r{number + 1}" for number in range(rules))
    started = time.thread_time()
    gbnf_to_lark(f'{grammar}\nr{rules} ::= "a"\nroot ::= r0')
    assert time.thread_time() - started < 2  # it was half a minute when each rule looked at all others
    with pytest.raises(ValueError, match="translated to Lark's syntax"):
        Grammar.gbnf(f'root ::= "{"a" * 2 * 10**5}"')
