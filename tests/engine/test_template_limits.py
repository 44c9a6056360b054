"""Chat templates render as Transformers renders them, and within limits of time and memory, whatever is in them."""

import re
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from saltus.engine.chat import template_limits
from saltus.engine.chat.template_limits import render_chat
from saltus.engine.encoding import PromptSettings, encode_prompt
from tiny_models import byte_tokenizer

TALK = [
    {"role": "user", "content": " the cat\n"}, {"role": "assistant", "content": "a dog"},
    {"role": "user", "content": "sat ö"},
]  # fmt: skip
FEATURES = """
{% macro quoted() %}<{{ caller(3) }}>{% endmacro %}{% call(x) quoted() %}{{ x }}{% endcall %}
{%- macro show(x, deep=0) -%}
{%- if x is mapping -%}
{%- for k, v in x.items() -%}{{ k ~ ':' }}{{ show(v, deep + 1) }}{%- if not loop.last -%},{%- endif -%}{%- endfor -%}
{%- elif x is iterable and x is not string -%}
[{% for y in x %}{{ show(y) }}{% if not loop.last %};{% endif %}{% endfor %}]
{%- else -%}{{ x|string|upper }}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last=-1, parts=[], text='') -%}
{%- for m in messages if m.role != 'nobody' -%}
{%- if loop.index0 == 2 %}{% break %}{% endif -%}
{%- if loop.first %}{% continue %}{% endif -%}
{%- set ns.parts = ns.parts + [m.content] -%}{%- set ns.text = ns.text ~ m['content'] ~ '|' -%}
{%- set (a, b) = (1, m.role) -%}{% set c, d = 'x' * 3, 7 % 3 ** 2 + 4 * 5 -%}
{{ loop.index }}/{{ loop.length }} {{ loop.revindex }} {{ loop.previtem.role if loop.previtem }} {{ a }}{{ b }}{{ c }}
{{ d }} {{ m.content.split(' ')[-1]|trim }} {{ m.content[1:3] }}
{% generation %}{{ m.content }}{% endgeneration %}
{%- endfor -%}
{{ show({'a': [1, {'b': none}], "c": messages}) }} {{ ns.parts|join(', ') }} {{ ns.text.rstrip('|') }}
{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|list|length }}
{{ messages|tojson(indent=2) }} {{ '%s-%04d' % ('a', 3) }} {{ '{:>4}|{}'.format(1, 'b') }} {{ [1, 2, 3]|sum }}
{{ [[1], [2]]|sum(start=[]) }} {{ messages[::-1]|map(attribute='role')|unique|sort|list }}
{% set block %}some {{ 1 }} text{% endset %}{{ block|length }} {{ nothing is defined }} {{ nothing }}
{{ nothing|default('d') }} {{ eos_token }} {{ strftime_now('%Y')|length }} {% filter upper %}abc{{ 1 }}{% endfilter %}
{% for i in range(3) %}{{ i }}{% else %}none{% endfor %} {% for x in [] %}{% else %}empty{% endfor %} {{ dict(a=1) }}
{{ 7 // 2 }} {{ 7 / 2 }} {{ -3 }} {{ 'a' in 'abc' }} {{ 'abc'.replace('b', 'd') }} {{ 'aXb'|lower|capitalize }}
{{ ['a', 'b']|last }} {{ 'x'.startswith('x') }} {{ {'a': 1}|items|list }} {{ cycler('a', 'b').next() }}
{{ 'a\\nb'|indent(2) }} {{ (1, 2)[0] }} {{ [1, 2, 3]|batch(2)|list }} {{ 'a-b'.join(['1', '2']) }}
"""


def tokenizer_with(template: str):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def refusal(template: str) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        render_chat(tokenizer_with(template), TALK)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_template_with_every_feature_writes_what_transformers_writes():
    tokenizer = tokenizer_with(FEATURES)
    expected = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert render_chat(tokenizer, TALK, add_generation_prompt=True) == expected
    assert "a:[1;b:NONE]" in expected


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in range(99999) %}{{ range(99999)|select('in', [1])|list|length }}{% endfor %}",
        "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set m = namespace(a=n.x, b=n.x) %}"
        "{% set n.x = m %}{% endfor %}{{ n.x }}",
    ],
)
def test_a_template_that_runs_for_ever_is_ended_in_any_thread(template, monkeypatch):
    monkeypatch.setattr(template_limits, "SECONDS", 0.02)
    with ThreadPoolExecutor(1) as pool:
        said = pool.submit(refusal, template).result()
    assert said == "it takes more than 0.02 seconds; take another chat template"


@pytest.mark.unchecked
@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10 ** 10 }}", "{{ 10 ** 10 * 'a' }}", "{{ [0] * 10 ** 9 }}", "{{ 'a'|center(10 ** 10) }}",
        "{{ 'a'.ljust(width=10 ** 10) }}", "{{ ['a']|tojson(indent=10 ** 9) }}", "{{ lipsum(n=100000) }}",
        "{{ 'a\\nb'|indent(10 ** 9) }}", "{{ '%1000000000d' % 1 }}", "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ '{:>1000000000}'.format(1) }}", "{{ '{:{}}'.format(1, 10 ** 9) }}", "{{ '%1000000000d'|format(1) }}",
        "{{ ('a' * 10 ** 6).replace('a', 'b' * 10 ** 6) }}", "{{ ('a' * 10 ** 5)|replace('a', 'b' * 10 ** 5) }}",
        "{{ ('a' * 9999).join(['b'] * 9999) }}", "{{ (['b'] * 9999)|join('a' * 9999) }}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = {1: n.x, 2: n.x} %}{% endfor %}",
        "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{{ (9 ** 99) ** (9 ** 9) }}", "{{ ('<!---->' * 10 ** 5)|striptags }}", "{{ ('a' * 10 ** 7)|list|length }}",
        "{{ ([[1] * 999] * 999)|sum(start=[]) }}",
        "{% set x %}{% for i in range(99999) %}" + "a" * 9999 + "{% endfor %}{% endset %}",
        "{% macro f(x) %}{% set y = x ~ 'a' %}{{ f(y) }}{% endmacro %}{{ f('a' * 10 ** 7) }}",
    ],
)  # fmt: skip
def test_a_template_that_makes_too_much_is_refused_before_it_has_made_it(template):
    tracemalloc.start()
    begun = time.thread_time()
    said = refusal(template)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200 << 20
    assert time.thread_time() - begun < 10  # what is not refused takes minutes, or for ever
    assert re.search("take another chat template|maximum recursion depth", said)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 1 // 0 }}", "ZeroDivisionError: integer division or modulo by zero"), ("{% for", "unexpected"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: maximum recursion depth exceeded"),
        ("{% block x %}{{ self.x() }}{% endblock %}", "RecursionError"), ("{{" + "(" * 5000 + "}}", "RecursionError"),
        ("{{ messages[9].content }}", "list object has no element 9"), ("{{ a.b.c }}", "'a' is undefined"),
        ("{{ messages[0].content + 1 }}", "TypeError: can only concatenate str"), ("{{ f() }}", "'f' is undefined"),
        ("{{ range(10 ** 9) }}", "OverflowError: Range too big"), ("{% include 'x' %}", "TypeError: no loader"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{{ raise_exception('roles\\nmust alternate') }}", "roles"),
    ],
)  # fmt: skip
def test_any_error_of_a_template_is_one_line(template, said):
    assert said in refusal(template)
    what = "is not Jinja" if template == "{% for" else "refuses these messages"
    with pytest.raises(ValueError, match=f"^the chat template of tiny {what} .{re.escape(said)}"):
        encode_prompt(tokenizer_with(template), TALK, PromptSettings(), "tiny")


def test_limits_are_for_each_rendering_and_leave_other_code_alone(monkeypatch):
    loop = "{% for a in range(200) %}{% endfor %}done"
    tokenizer = tokenizer_with(loop)
    assert [render_chat(tokenizer, TALK) for _ in range(3)] == ["done"] * 3
    monkeypatch.setattr(template_limits, "SECONDS", 0.0)
    assert "takes more than" in refusal(loop)
    assert tokenizer.apply_chat_template(TALK, tokenize=False) == "done"
    monkeypatch.undo()
    found = []
    threads = [threading.Thread(target=lambda: found.append(render_chat(tokenizer, TALK))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["done"] * 4
