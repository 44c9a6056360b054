"""Tests in another process judge a program: it cannot forge their verdict, and honest programs pass as beside them."""

import os

import pytest

from saltus.evaluation.sandbox.run_program import GradedProgram, run_tests

pytestmark = pytest.mark.skipif(os.name != "posix", reason="programs are confined on Linux and macOS")

EQUAL = "__eq__ = lambda self, other: True\n    __ne__ = lambda self, other: False\n    __hash__ = None\n"
RETURNS = "\ndef f(x):\n    return {}"
WRITES_EVERYWHERE = (
    "import os\nfor file in range(3, 64):\n    try:\n        os.write(file, {})\n    except OSError:\n        pass\n"
)
FORGERIES = {  # program, tests of f(2) == 4 that it passes if they run beside it, reason
    "equals all": (f"class A:\n    {EQUAL}" + RETURNS.format("A()"), "assert f(2) == 4", "AssertionError"),
    "a number that equals all": (
        f"class A(int):\n    {EQUAL}" + RETURNS.format("A()"),
        "assert f(2) == 4",
        "AssertionError",
    ),
    "a list that equals all": (
        f"class A(list):\n    {EQUAL}" + RETURNS.format("A()"),
        "assert f(2) == [4] and f(2) == (4,)",
        "AssertionError",
    ),
    "equals all in a list": (
        f"class A:\n    {EQUAL}" + RETURNS.format("[A()]"),
        "assert f(2) == [4]",
        "AssertionError",
    ),
    "near to all": (
        "class A:\n    __sub__ = __rsub__ = __abs__ = lambda *_: 0\n" + RETURNS.format("A()"),
        "assert abs(f(2) - 4) < 1e-6",
        "TypeError",
    ),
    "contains all": (
        "class A:\n    __contains__ = lambda *_: True\n    __iter__ = lambda self: iter(())\n" + RETURNS.format("A()"),
        "assert 4 in f(2)",
        "AssertionError",
    ),
    "another abs": ("abs = lambda x: 0" + RETURNS.format("0"), "assert abs(f(2) - 4) < 1e-6", "AssertionError"),
    "another builtin": (
        "import builtins\nbuiltins.abs = builtins.sorted = lambda x: 0" + RETURNS.format("0"),
        "assert abs(f(2) - 4) < 1e-6",
        "AssertionError",
    ),
    "another module": (
        "class math:\n    fabs = lambda x: 0" + RETURNS.format("0"),
        "assert math.fabs(f(2) - 4) < 1e-6",
        "AssertionError",
    ),
    "another test": (
        "check = print" + RETURNS.format("0"),
        "def check(g):\n    assert g(2) == 4\ncheck(f)",
        "AssertionError",
    ),
    "an end of the tests' loop": (
        "def f(x):\n    raise StopIteration",
        "try:\n    assert all(y == 4 for y in map(f, [2]))\nexcept RuntimeError:\n    assert False",
        "AssertionError",
    ),
    "changed arguments": (
        "def f(x):\n    x.clear()\n    return []",
        "x = [4, 2]\nassert f(x) == sorted(x)",
        "AssertionError",
    ),
    "exit": ("import sys" + RETURNS.format("sys.exit(0)"), "assert f(2) == 4", "left early"),
    "other exits": (
        "import os, sys\nsys.exit = os._exit = print" + RETURNS.format("0"),
        "assert f(2) == 4",
        "AssertionError",
    ),
    "at exit": (
        "import atexit, os\natexit.register(os.write, 3, b'+')" + RETURNS.format("os._exit(0)"),
        "assert f(2) == 4",
        "left early",
    ),
    "other JSON": (
        "import json\njson.dumps = lambda message: '[\"+\", []]'" + RETURNS.format("0"),
        "assert f(2) == 4",
        "TypeError",
    ),
    "a report": (WRITES_EVERYWHERE.format("b'+'") + RETURNS.format("0"), "assert f(2) == 4", ""),
    "a lost program": (WRITES_EVERYWHERE.format("b'?'") + "os._exit(0)" + RETURNS.format("0"), "assert f(2) == 4", ""),
    "the launcher": (
        "import sys\nframe = sys._getframe()\nwhile frame:\n    for name in ('execute', 'describe_exception'):\n"
        "        frame.f_globals[name] = lambda *_: b'+'\n    frame = frame.f_back\n1 / 0" + RETURNS.format("0"),
        "assert f(2) == 4",
        "",
    ),
}

ANSWERS = {  # of honest programs, and what tests may compare them with
    "None": "None",
    "True": "True",
    "10**5000": "10**5000",
    "-(1 << 63)": "-(1 << 63)",
    "0.1 + 0.2": "0.1 + 0.2",
    "float('inf')": "float('inf')",
    "'\\ud800 é'": "'\\ud800 é'",
    "(1, [2, {3}])": "(1, [2, {3}])",
    "{(1, 2): [3], 'a': None}": "{(1, 2): [3], 'a': None}",
    "frozenset('ab')": "frozenset('ab')",
    "range(3)": "range(3)",
    "1 + 2j": "1 + 2j",
    "b'a'": "b'a'",
    "bytearray(b'a')": "b'a'",
    "collections.namedtuple('A', 'x')(1)": "(1,)",
    "collections.Counter('aab')": "{'a': 2, 'b': 1}",
    "collections.OrderedDict(a=1)": "{'a': 1}",
    "collections.defaultdict(list, a=[1])": "{'a': [1]}",
    "collections.deque([1])": "__import__('collections').deque([1])",
    "{1: 2}.keys()": "{1}",
    "enum.IntEnum('E', 'a').a": "1",
    "decimal.Decimal('0.10')": "__import__('decimal').Decimal('0.1')",
    "fractions.Fraction(1, 3)": "__import__('fractions').Fraction(1, 3)",
    "datetime.datetime(2024, 1, 2, 3)": "__import__('datetime').datetime(2024, 1, 2, 3)",
    "numpy.float32(0.1)": "0.1",
    "numpy.int64(3)": "3",
    "list(numpy.arange(4).reshape(2, 2)[1])": "[2, 3]",
}


@pytest.mark.parametrize(("program", "tests", "why"), FORGERIES.values(), ids=FORGERIES)
def test_a_program_cannot_pass_by_what_it_does_to_its_tests(program: str, tests: str, why: str) -> None:
    graded = GradedProgram(program, tests, ("f",), {"math": "math"})
    verdict = run_tests(graded, seconds=20.0)
    assert not verdict.passed
    assert verdict.reason.startswith(why)


@pytest.mark.slow
def test_answers_equal_what_they_equal_beside_their_tests() -> None:
    imports = "import collections, datetime, decimal, enum, fractions, numpy\n"
    program = imports + "".join(f"def f{i}():\n    return {answer}\n" for i, answer in enumerate(ANSWERS))
    tests = "".join(f"assert f{i}() == {expected}, {i}\n" for i, expected in enumerate(ANSWERS.values()))
    assert run_tests(GradedProgram(program, tests), seconds=20.0).reason == "passed"


def test_tests_use_objects_functions_and_errors_of_a_program() -> None:
    program = """
import sys
class Pair:
    def __init__(self, a, b):
        self.a, self.b = a, b
    def __str__(self):
        return f"{self.a}-{self.b}"
class Wrong(ValueError):
    pass
def total(pairs, weight=lambda pair: 1):
    return sum(weight(pair) * (pair.a + pair.b) for pair in pairs)
def numbers(limit):
    if limit < 0:
        raise Wrong("negative")
    yield from range(limit)
def adder(x):
    return lambda y: x + y
def sum(a, b):
    return a + b
"""
    program = program.replace("return sum(weight", "return __builtins__['sum'](weight")
    tests = """
pair = Pair(1, b=2)
pair.b = 3
assert total([pair, Pair(5, 6)]) == 15 and str(pair) == "1-3" and pair.a == 1 and pair != 1
assert total([pair], lambda pair: pair.b) == 12
assert list(numbers(3)) == [0, 1, 2] and [x for x, _ in zip(numbers(10**9), range(2))] == [0, 1]
assert adder(1)(2) == 3 and sum(1, 2) == 3 and sys.maxsize > 1
try:
    next(iter(numbers(-1)))
except ValueError as error:
    assert str(error) == "negative"
else:
    assert False
"""
    graded = GradedProgram(program, tests, ("total", "numbers", "sum"), {"sys": "sys"})
    assert run_tests(graded, seconds=20.0).reason == "passed"


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("def f(:", "SyntaxError"),
        ("", "NameError: name 'f' is not defined"),
        ("def f(x):\n    raise KeyError(x)", "KeyError"),
        ("import os\ndef f(x):\n    os.fork()", "tried to fork"),
        ("import os, signal\ndef f(x):\n    os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
        ("def f(x):\n    while True:\n        pass", "took more than 0.6 s"),
        ("while True:\n    pass", "took more than 0.6 s"),
        ("def f(x):\n    return [f(x)]", "RecursionError"),
        ("def f(x):\n    y = []\n    while True:\n        y.append(bytes(10**7))", "used more than 512 MB"),
    ],
)
def test_a_tested_program_fails_with_its_own_reason(program: str, why: str) -> None:
    seconds = 0.6 if why.startswith("took") else 20.0
    verdict = run_tests(GradedProgram(program, "assert f(2) == 4", ("f",)), seconds=seconds, memory_mb=512)
    assert not verdict.passed
    assert verdict.reason.startswith(why)
