"""Render chat templates within limits of time and memory.

A template comes with a model, from anybody. Jinja's sandbox keeps it from the machine, but not from running for ever:
two nested loops over ranges take days. Signals cannot interrupt it, since servers render in threads. So a template is
compiled to count: loops, calls, filters, and what operators make are charged to a budget, and what could be large is
estimated before it is made.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, lru_cache, wraps
from typing import Any

from jinja2 import TemplateError, TemplateRuntimeError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from saltus.loading.fetching import first_line

SECONDS = 2.0  # of the thread's processor, for one rendering; common templates take milliseconds
MAX_VALUE = 1 << 25  # bytes of a string, or of a list with what is in it
MAX_TOTAL = 1 << 30  # bytes of all that a rendering makes
MAX_ITEMS = 1 << 20  # that a filter reads
MAX_BITS = 1 << 13  # of a product or a power
LOREM_IPSUM = "generate_lorem_ipsum"
PADDING = {
    "batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "tojson", "zfill", LOREM_IPSUM,
}  # fmt: skip
ITERATING = {
    "batch", "dictsort", "groupby", "items", "join", "list", "map", "max", "min", "random", "reject", "rejectattr",
    "reverse", "select", "selectattr", "slice", "sort", "sum", "unique",
}  # fmt: skip
QUADRATIC = {"striptags", "title", "urlize", "wordwrap", "xmlattr"}  # in the length of their text
FORMATTING = {"%", "format", "format_map", "strftime_now"}
CONTAINERS = (list, tuple, dict, Namespace)
WIDE_FORMAT = re.compile(r"\d{5}|\*|\{[^{}]*\{")  # a width of five digits, or one that is an argument


class TemplateLimitError(TemplateRuntimeError):
    """A template runs too long, or makes too much."""

    def __init__(self, what: str) -> None:
        super().__init__(f"it {what}; take another chat template")


@dataclass
class _Budget:
    """What a rendering may still take."""

    end: float = field(default_factory=lambda: time.monotonic() + SECONDS)
    processor_end: float = field(default_factory=lambda: time.thread_time() + SECONDS)
    total: int = MAX_TOTAL
    sizes: dict[int, tuple[Any, int]] = field(default_factory=dict)  # of lists and dicts, which templates cannot change

    def spend(self, size: int = 0) -> None:
        self.total -= size
        if self.total < 0:
            raise TemplateLimitError(f"makes more than {MAX_TOTAL >> 20} MiB of text")
        # a thread that waits for others takes no time of a processor, whose clock is the slower one to read
        if time.monotonic() > self.end and time.thread_time() > self.processor_end:
            raise TemplateLimitError(f"takes more than {SECONDS:g} seconds")

    def size_of(self, value: Any) -> int:
        """Bytes of a value written out, so that what a list has twice counts twice."""
        return self._container_size(value)[0] if isinstance(value, CONTAINERS) else _leaf_size(value)

    def _container_size(self, value: Any) -> tuple[int, bool]:
        """Its size, and whether that stays."""
        if id(value) in self.sizes:
            return self.sizes[id(value)][1], True
        self.spend()
        constant, size = not isinstance(value, Namespace), sys.getsizeof(value)
        inner = object.__getattribute__(value, "_Namespace__attrs") if isinstance(value, Namespace) else value
        for item in inner.values() if isinstance(inner, dict) else inner:
            if isinstance(item, CONTAINERS):
                more, is_constant = self._container_size(item)
                size, constant = size + more, constant and is_constant
            else:
                size += _leaf_size(item)
            self.check(size)
        if constant:
            self.sizes[id(value)] = value, size
        return size, constant

    def check(self, size: int) -> None:
        if size > MAX_VALUE:
            raise TemplateLimitError(f"makes a value of more than {MAX_VALUE >> 20} MiB")


def _leaf_size(value: Any) -> int:
    return sys.getsizeof(value) if isinstance(value, str | bytes) else 8


_budget: ContextVar[_Budget | None] = ContextVar("budget of a chat template", default=None)


def _measured(value: Any) -> Any:
    """The value, charged to the budget."""
    if (budget := _budget.get()) is not None:
        budget.spend(sys.getsizeof(value) if isinstance(value, (str, *CONTAINERS)) else 0)
        budget.check(budget.size_of(value))
    return value


def _check_call(name: str, values: list[Any], numbers: list[Any]) -> None:
    """Raise TemplateLimitError if a function or filter of this name would make too much of its arguments."""
    if (budget := _budget.get()) is None:
        return
    budget.spend()
    sizes = [budget.size_of(value) for value in values]
    text: Any = values[0] if values else None
    if name in ITERATING and hasattr(text, "__len__") and len(text) > MAX_ITEMS:
        raise TemplateLimitError(f"reads more than {MAX_ITEMS:,} items by {name}")
    if name in QUADRATIC and sizes and sizes[0] > 1 << 16:
        raise TemplateLimitError(f"calls {name} for a long text")
    if name in FORMATTING and isinstance(text, str) and WIDE_FORMAT.search(text):
        raise TemplateLimitError(f"formats by {text[:20]!r}")
    if name in PADDING:
        size = max(sizes, default=1) * (1000 if name == LOREM_IPSUM else 1)
        for number in numbers:
            size *= 1 + abs(number)
        budget.check(size)
    if name == "replace" and len(values) > 2 and all(isinstance(value, str) for value in values[:3]):
        budget.check(sizes[0] + 4 * text.count(values[1]) * len(values[2]))
    if name == "join":
        separator = max((len(value) for value in values if isinstance(value, str)), default=0)
        items = max((len(value) for value in values if hasattr(value, "__len__")), default=0)
        budget.check(sum(sizes) + 4 * separator * items)
    if name == "sum" and len(values) > 1 and not isinstance(text, str):
        budget.check(sizes[0] * len(text))


def _arguments(name: str, positional: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """The positional arguments, iterators read where a function would read them, after a check of all."""
    if name in ("join", "sum"):
        positional = tuple(list(argument) if hasattr(argument, "__next__") else argument for argument in positional)
    every = [*positional, *named.values()]
    _check_call(name, every, [argument for argument in every if isinstance(argument, int)])
    return positional


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or a test that is charged to the budget; `wraps` keeps what Jinja passes it."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        given = _arguments(name, arguments[skipped:], named)
        return _measured(function(*arguments[:skipped], *given, **named))

    return call


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the filters, globals and tags of another environment, and with limits."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, other: Any) -> None:
        extensions = [type(extension) for extension in other.extensions.values()]
        super().__init__(
            trim_blocks=other.trim_blocks, lstrip_blocks=other.lstrip_blocks, extensions=extensions, finalize=_measured
        )
        self.filters = {name: _limited(name, function) for name, function in other.filters.items()}
        self.tests = {name: _limited(name, function) for name, function in other.tests.items()}
        self.globals = dict(other.globals)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The syntax tree of a template, with calls that count."""
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            text = sum(len(data.data) for part in loop.body for data in part.find_all(nodes.TemplateData))
            loop.body.insert(0, nodes.ExprStmt(_call("charge", nodes.Const(text))))
            if loop.test is not None:
                loop.test = nodes.And(_call("charge", nodes.Const(0)), loop.test)
        _Rewriter().visit(tree)
        tree.set_environment(self)
        return tree

    def charge(self, size: int) -> bool:
        """Charge an iteration that writes so many characters."""
        if (budget := _budget.get()) is not None:
            budget.spend(4 * size)
        return True

    def concatenate(self, *parts: Any) -> str:
        """What the operator ~ makes."""
        _check_call("~", list(parts), [])
        return _measured("".join(map(str, parts)))

    def measure(self, value: Any) -> Any:
        """A list, tuple or dict that a template writes down."""
        return _measured(value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The value of an operator, if it is not too large. Errors: TemplateLimitError."""
        if (budget := _budget.get()) is not None:
            for operand, other in ((left, right), (right, left)):
                if operator == "*" and isinstance(operand, str | list | tuple) and isinstance(other, int):
                    budget.check(budget.size_of(operand) * max(other, 0))
            if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
                bits, more = left.bit_length(), right.bit_length()
                if (bits * abs(right) if operator == "**" else bits + more) > MAX_BITS:
                    raise TemplateLimitError(f"computes {operator} of large numbers")
            _check_call(operator, [left, right], [])
        return _measured(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, /, *arguments: Any, **named: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The value of a call, as of a macro, if it is not too large. Errors: TemplateLimitError."""
        if getattr(function, "__self__", None) is self:  # one of the calls that count
            return function(*arguments)
        method = getattr(function, "__wrapped__", function)  # str.format is wrapped by the sandbox
        name, text = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        first = (text,) if isinstance(text, str) else ()
        chosen = {key: value for key, value in named.items() if not key.startswith("_")}  # Jinja's own begin so
        given = _arguments(name, (*first, *arguments), chosen)[len(first) :]
        return _measured(super().call(context, function, *given, **named))


class _Rewriter(NodeTransformer):
    """Put a call that counts in the place of what makes a text, a list or a dict without one."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concatenate", *node.nodes)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _call("measure", node) if node.items else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _call("measure", node) if node.items else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _call("measure", node) if node.items and node.ctx == "load" else node


def _call(name: str, *arguments: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None)


@cache
def _limited_compiler() -> Callable[[str], Any]:
    """Compiles templates with the tags, filters and functions of Transformers, and with limits.

    Transformers offers no place to give it to, and its own evaluates constants such as 9 ** 9 ** 9. So it takes the
    place of that one, which still compiles what is not rendered by `render_chat`.
    """
    from transformers.utils import chat_template_utils

    plain: Any = chat_template_utils._compile_jinja_template
    environment = plain("").environment

    @lru_cache
    def limited(text: str) -> Any:
        return LimitedEnvironment(environment).from_string(text)

    chat_template_utils._compile_jinja_template = lambda text: (plain if _budget.get() is None else limited)(text)
    return limited


def check_chat_template(text: str) -> None:
    """Compile a template. Errors: Jinja's TemplateSyntaxError."""
    _limited_compiler()(text)


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], /, **settings: Any) -> str:
    """A conversation as the tokenizer's chat template writes it. Errors: ValueError of one line.

    `settings` are those of the tokenizer's `apply_chat_template`.
    """
    _limited_compiler()
    token = _budget.set(_Budget())
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **settings)
    except Exception as error:  # a template may do anything wrong
        raise ValueError(describe_template_error(error)) from error
    finally:
        _budget.reset(token)


def describe_template_error(error: Exception) -> str:
    """The first line of an error in a template, with its kind where the message alone says little."""
    line = first_line(error)
    plain = isinstance(error, TemplateError | ValueError) or line == type(error).__name__
    return line if plain else f"{type(error).__name__}: {line}"
