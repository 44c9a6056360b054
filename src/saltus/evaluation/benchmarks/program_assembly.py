"""Build a program from an answer, and the tests of its task, for the sandbox.

A chat model fences its code and adds words around it; a model without template continues the prompt, and goes on
after the function. Both forms are read here. The only repair is the indentation of a body that was fenced without it.

Tests run in a process of their own (run_program.py): they get what their task gives, such as functions of HumanEval's
prompts and names in MBPP's reference, and of the answer only what it defines.
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Mapping
from typing import Any

from saltus.evaluation.sandbox.run_program import GradedProgram

CODE_FENCE = re.compile(r"^([ \t]*)```[ \t]*([\w+-]*)[^\n]*\n(.*?)(^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
PYTHON_FENCE_LANGUAGES = ("python", "python3", "py", "")
TOP_LEVEL_STATEMENT = re.compile(r"^[^\s)\]}]", re.MULTILINE)  # that does not close a bracket from above
CODE_START = re.compile(r"^(?:(?:import|from|async def|def|class)\b|@|\w+ *=[^=])", re.MULTILINE)  # code out of a fence


def humaneval(row: Mapping[str, Any], text: str) -> GradedProgram:
    """HumanEval (Chen et al. 2021): the text is the rest of `row["prompt"]`, or a fenced body or function.

    If the text defines the function anew, the part of the prompt above its definition is put in front.
    """
    if _starts_indented(text):
        return _with_tests(row, row["prompt"] + function_body(text))
    definition = _definition(row)
    code = extract_code(text, definition)
    if definition.search(code):
        return _with_tests(row, f"{_above(row)}\n{code}")
    indented = code if _starts_indented(code) else textwrap.indent(code, "    ")
    return _with_tests(row, row["prompt"] + function_body(indented))


def mbpp(row: Mapping[str, Any], text: str) -> GradedProgram:
    """MBPP (Austin et al. 2021): the text is a program, fenced or not, for `test_setup_code` and `test_list`.

    The set-up uses the program's classes, and runs with it.
    """
    program = "\n".join([extract_code(text), row.get("test_setup_code") or "", ""])
    functions, modules = _defined_names(row.get("code") or "")
    return GradedProgram(program, "\n".join([*row["test_list"], ""]), functions, modules)


def infilling(row: Mapping[str, Any], text: str) -> GradedProgram:
    """HumanEval infilling (Bavarian et al. 2022): prompt, text and suffix; the text is cut to the lines of the hole.

    A hole of whole lines gets whole lines; a hole that ends within a line is filled within that line.
    """
    hole = row["canonical_solution"]
    code = extract_code(text) if text.lstrip().startswith("```") else text
    lines = code.splitlines(keepends=True)
    if hole.endswith("\n"):
        filled = "".join(lines[: hole.count("\n")])
        filled = filled if filled.endswith("\n") else filled + "\n"
    else:
        filled = "".join(lines[: hole.count("\n") + 1]).removesuffix("\n")
    return _with_tests(row, row["prompt"] + filled + row["suffix"])


def function_body(text: str) -> str:
    """The text up to the first statement at column 0: def, class, if, print, a comment, words, a fence."""
    end = TOP_LEVEL_STATEMENT.search(text)
    return text[: end.start()] if end else text


def extract_code(text: str, definition: re.Pattern[str] | None = None) -> str:
    """The first fenced Python block, preferably one that contains `definition`; without a fence, what parses as code.

    The last block may lack its end mark, and the first its begin mark if the prompt opened the fence.
    """
    fences = [fence for fence in CODE_FENCE.finditer(text) if fence[2].lower() in PYTHON_FENCE_LANGUAGES]
    head = text[: fences[0].start()] if fences else text
    if CODE_START.match(head.lstrip()) and (definition is None or definition.search(head) or not fences):
        return _longest_parsable_code(head)
    blocks = [_remove_indent(fence[1], fence[3]) if fence[4] else _longest_parsable_code(fence[3]) for fence in fences]
    fitting = [block for block in blocks if definition is not None and definition.search(block)]
    return [*fitting, *blocks, _longest_parsable_code(text)][0]


def _starts_indented(text: str) -> bool:
    """True if it begins with an indented line of code."""
    line = text.lstrip("\r\n")
    return line.startswith((" ", "\t")) and not line.lstrip().startswith("```")


def _remove_indent(indent: str, block: str) -> str:
    """A block without the indentation of its fence (as in a list)."""
    return re.sub(f"^{indent}", "", block, flags=re.MULTILINE) if indent else block


def _longest_parsable_code(text: str) -> str:
    """The longest part from the first line of code that Python can parse, without words around it, or a last function
    that is cut off."""
    begin = CODE_START.search(text)
    code = text[begin.start() :] if begin else text
    ends = [len(code), *(statement.start() for statement in reversed(list(TOP_LEVEL_STATEMENT.finditer(code))))]
    return next((code[:end] for end in ends if end and _parses(code[:end])), code)


def _parses(code: str) -> bool:
    return _syntax_tree(code) is not None


def _syntax_tree(code: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes that later versions of Python refuse
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _defined_names(code: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """The functions and classes that code defines, and the modules that it imports, by name."""
    tree = _syntax_tree(code)
    statements = tree.body if tree else []
    functions = [part.name for part in statements if isinstance(part, (ast.FunctionDef, ast.ClassDef))]
    imported = [name for part in statements if isinstance(part, ast.Import) for name in part.names]
    return tuple(functions), {name.asname: name.name for name in imported if name.asname} | {
        name.name: name.name for name in imported if not name.asname and "." not in name.name
    }


def _definition(row: Mapping[str, Any]) -> re.Pattern[str]:
    return re.compile(rf"^(?:async )?def {re.escape(row['entry_point'])}\b", re.MULTILINE)


def _above(row: Mapping[str, Any]) -> str:
    """The part of a prompt above the function that is asked for: imports, and functions that tests use."""
    definition = _definition(row).search(row["prompt"])
    return row["prompt"][: definition.start()] if definition else ""


def _with_tests(row: Mapping[str, Any], code: str) -> GradedProgram:
    tests = f"{_above(row)}\n{row['test']}\ncheck({row['entry_point']})\n"
    return GradedProgram(f"{code}\n", tests, (row["entry_point"],))
