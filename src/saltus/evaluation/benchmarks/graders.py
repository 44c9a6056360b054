"""Grade answers: exact numbers, programs that pass their tests, and overlap with a reference text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

from saltus.evaluation.benchmarks import program_assembly
from saltus.evaluation.benchmarks.math_answers import HAS_MATH_VERIFY, math_answer
from saltus.evaluation.sandbox.run_program import GradedProgram, run_tests

Score = dict[str, bool | float]

# A sign is none after what it would be taken from: 10-5 ends in 5. Commas part thousands, or numbers.
NUMBER_PATTERN = re.compile(r"((?<![\w.,)])[-−])?\$?((?:\d{1,3}(?:,\d{3})+(?![\d])|\d+)(?:\.\d+)?|\.\d+)", re.ASCII)
# What follows the number in "#### 1. Add them", a heading of later lines.
NUMBERED_HEADING = re.compile(r"[.)][*_]*[ \t]+[*_]*[^\W\d_].*\n\s*\S")
ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")


@dataclass(frozen=True)
class Grader:
    """How answers of one kind are scored: the name of the metric, and the score of (row, text)."""

    metric_name: str
    score: Callable[[Mapping[str, Any], str], Score]
    note: str = ""  # what a user should know of it before a run


def main_score(score: Mapping[str, bool | float]) -> float:
    """The part of a score that counts as "accuracy", 0 to 1."""
    for name in ("passed", "correct", "rougeL"):
        if name in score:
            return float(score[name])
    raise ValueError(
        f"a score of {', '.join(score) or 'nothing'} has no headline; graders give passed, correct or rougeL"
    )


def exact_answer(row: Mapping[str, Any], text: str) -> Score:
    """GSM8K (Cobbe et al. 2021): 1 if the number after "####", or the last one, equals that of `row["answer"]`."""
    reference = last_number(row["answer"])
    if reference is None:
        raise ValueError(f"the reference {row['answer'][:40]!r} has no number; GSM8K's answers end in '#### number'")
    return {"correct": last_number(text) == reference}


def last_number(text: str) -> Decimal | None:
    """The first number directly after "####", else the last number of the text; None without one."""
    numbers = {match.start(): match for match in NUMBER_PATTERN.finditer(text)}
    for marker in re.finditer(r"####[\s*_]*", text):  # a heading of Markdown looks the same, but has words after it
        number = numbers.get(marker.end())
        if number is not None and not NUMBERED_HEADING.match(text, number.end()):
            return _to_decimal(number)
    return _to_decimal([*numbers.values()][-1]) if numbers else None


def _to_decimal(match: re.Match[str]) -> Decimal:
    value = Decimal(match[2].replace(",", ""))
    return -value if match[1] else value


def rouge(row: Mapping[str, Any], text: str) -> Score:
    """F-measures of ROUGE-1, -2 and -L (Lin 2004), stemmed, against `row["reference"]`; needs the extra `bench`."""
    scores = _rouge_scorer().score(row["reference"], text)
    return {name: float(scores[name].fmeasure) for name in ROUGE_TYPES}


@lru_cache(maxsize=1)
def _rouge_scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise ValueError('ROUGE needs the package rouge-score; pip install ".[bench]" in the clone') from None
    return RougeScorer(list(ROUGE_TYPES), use_stemmer=True)


def _pass_at_1(build_program: Callable[[Mapping[str, Any], str], GradedProgram]) -> Grader:
    return Grader("pass@1", lambda row, text: {"passed": run_tests(build_program(row, text)).passed})


def _math_grader() -> Grader:
    if HAS_MATH_VERIFY:
        return Grader("exact answer", math_answer)
    note = (
        "math-verify is not installed: answers are compared as normalised text, so that some right ones count as wrong;"
        ' pip install ".[bench]" in the clone compares their values'
    )
    return Grader("exact answer as text", math_answer, note)


GRADERS: dict[str, Grader] = {
    "gsm8k": Grader("exact answer", exact_answer),
    "math": _math_grader(),
    "humaneval": _pass_at_1(program_assembly.humaneval),
    "mbpp": _pass_at_1(program_assembly.mbpp),
    "infilling": _pass_at_1(program_assembly.infilling),
    "rouge": Grader("ROUGE-L", rouge),
}
