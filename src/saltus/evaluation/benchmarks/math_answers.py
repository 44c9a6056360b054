"""Grade answers to problems of MATH: find the final answer of a solution, and compare it with the reference's."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

HAS_MATH_VERIFY = importlib.util.find_spec("math_verify") is not None

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_ANSWER_IS = re.compile(r"answer is:?\s*(.+)", re.IGNORECASE)
_REMOVED = re.compile(r"\\left|\\right|\\[!,;: ]|\\\$|\$|\\?%|\^\s*\{?\\circ\}?|\\displaystyle|\\mathrm\{~\}|~")
_UNIT = re.compile(r"(?<=[\d}])\s*\\(?:text|mbox|mathrm)\{\s*[a-zA-Z.]+(?:\s[a-zA-Z]+)?\s*\}(?:\^\{?[23]\}?)?$")
_WORDS = re.compile(r"\\(?:text|textbf|textit|mbox|mathrm|mathbf)\{([^{}]*)\}")


def math_answer(row: Mapping[str, Any], text: str) -> dict[str, bool | float]:
    r"""MATH (Hendrycks et al. 2021): 1 if the final answer equals `row["answer"]`, or that of `row["solution"]`.

    Compared as numbers, expressions, intervals and sets by math-verify where it is installed, else as normalised text.
    Errors: ValueError for a reference without an answer.
    """
    reference = row.get("answer") or final_answer(row["solution"])
    if not isinstance(reference, str):
        raise ValueError(
            f"the reference {row['solution'][:40]!r} has no answer; give rows an answer, or a solution that has it"
            " in \\boxed{}"
        )
    answer = final_answer(text)
    return {"correct": answer is not None and same_answer(reference, answer)}


def final_answer(text: str) -> str | None:
    r"""What stands in the last \boxed{}, else after the last "answer is" on its line; None without either."""
    for box in reversed(list(_BOX.finditer(text))):
        rest = text[box.end() :]
        if not rest.startswith("{"):
            return rest.partition("$")[0].partition("\n")[0].strip().rstrip(".")  # \boxed 5
        depth = 0
        for place, letter in enumerate(rest):
            depth += (letter == "{") - (letter == "}")
            if depth == 0:
                return rest[1:place].strip()
    answers = _ANSWER_IS.findall(text)
    if not answers:
        return None
    formula = re.match(r"\$([^$]+)\$|\\\((.+?)\\\)", answers[-1])
    return (formula[1] or formula[2] if formula else answers[-1].partition(". ")[0]).strip().rstrip(".*")


def same_answer(reference: str, answer: str) -> bool:
    """True if both are the same text after `normalised_answer`, or the same value by math-verify.

    math-verify bounds its time (5 s for each comparison) by signals, so this belongs to the main thread.
    """
    if normalised_answer(reference) == normalised_answer(answer):
        return True
    if not HAS_MATH_VERIFY:
        return False
    parse, verify = _math_verify()
    return bool(verify(parse(reference), parse(answer)))


def normalised_answer(answer: str) -> str:
    r"""One spelling for answers that mean the same, after the rules of MATH's own evaluation (`math_equivalence`).

    Without spaces, \left and \right, units, dollars, percents, degrees and a short "x="; \frac12, 1/2 and 0.5 are
    \frac{1}{2}; .5 is 0.5; 1,000 is 1000.
    """
    text = answer.replace("{,}", ",").replace("tfrac", "frac").replace("dfrac", "frac").strip()
    text = _WORDS.sub(r"\1", _UNIT.sub("", text.rstrip(".")))
    text = "".join(_REMOVED.sub("", text).split())
    if len(sides := text.split("=")) == 2 and len(sides[0]) <= 2:
        text = sides[1]
    if re.fullmatch(r"[-−]?\d{1,3}(,\d{3})+(\.\d+)?", text):
        text = text.replace(",", "")
    text = re.sub(r"(?<![\d.])\.(?=\d)", "0.", text).replace("−", "-")
    text = re.sub(r"^(-?\d+)\.0+$", r"\1", text)
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac(\w)", r"\\frac{\1}", text)
    text = re.sub(r"(\\frac\{\w\})(\w)", r"\1{\2}", text)
    text = re.sub(r"^(-?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", text)
    return r"\frac{1}{2}" if text == "0.5" else text


@lru_cache(maxsize=1)
def _math_verify() -> Any:
    """Its functions: the parsed answer of a text, and the comparison (reference first)."""
    from math_verify import LatexExtractionConfig, parse, verify  # pyright: ignore[reportMissingImports]: an extra

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # an answer that is no formula is no news
    whole = [LatexExtractionConfig(boxed_match_priority=0)]
    return lambda answer: parse(f"\\boxed{{{answer}}}", whole), verify
