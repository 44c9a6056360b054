"""Answers are graded as their benchmarks do: right ones pass in every dress, wrong ones in none."""

import os
import sys
from decimal import Decimal

import pytest

from saltus.evaluation.benchmarks import math_answers
from saltus.evaluation.benchmarks.graders import GRADERS, exact_answer, last_number, main_score

confined = pytest.mark.skipif(os.name != "posix", reason="programs are confined on Linux and macOS")

PROMPT = '''from typing import List


def half(number: int) -> int:
    return number // 2


def middle(values: List[int]) -> int:
    """ The value in the middle of the sorted list.
    >>> middle([3, 1, 2])
    2
    """
'''
BODY = "    ordered = sorted(values)\n    # the upper of two\n    return ordered[half(len(ordered))]\n"
CHAIN = "def check(candidate):\n    assert candidate([3, 1, 2]) == 2\n    assert candidate([4, 1, 2, 3]) == 3\n"
HUMANEVAL = {"task_id": "Own/0", "prompt": PROMPT, "entry_point": "middle", "test": CHAIN}
FUNCTION = f"def middle(values: List[int]) -> int:\n{BODY}"
MBPP = {
    "text": "Write a function to add up a chain of links.",
    "test_setup_code": "chain = Link(1, Link(2, None))",
    "test_list": ["assert total(chain) == 3", "assert total(None) == 0"],
}
LINKS = (
    "class Link:\n    def __init__(self, value, rest):\n        self.value, self.rest = value, rest\n\n"
    "def total(link):\n    return link.value + total(link.rest) if link else 0\n"
)
LINE = {
    "task_id": "SingleLineInfilling/Own/0/L1",
    "prompt": PROMPT + "    ordered = sorted(values)\n",
    "suffix": "    return ordered[place]\n",
    "canonical_solution": "    place = half(len(ordered))\n",
    "entry_point": "middle",
    "test": CHAIN,
}
SPAN = LINE | {
    "prompt": PROMPT + "    ordered = sor",
    "suffix": "(ordered))\n    return ordered[place]\n",
    "canonical_solution": "ted(values)\n    place = half(len",
}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("72", "72"),
        ("She pays $72.", "72"),
        ("16 - 3 - 4 = 9, and 9 * 2 = 18 dollars", "18"),
        ("#### 72\n\nQuestion: There are 5 cars.", "72"),
        ("####72", "72"),
        ("#### **42** apples, 7 pears", "42"),
        ("#### Step 1: count\n9 eggs", "9"),
        ("#### 1. Add the numbers\n5+13=18\n\n#### 18", "18"),
        ("#### **1)** Add the numbers\n5+13=18", "18"),
        ("#### 18.\n\n7 is a prime.", "18"),
        ("#### 18. The dogs weigh 3 kg\n", "18"),
        ("It costs 1,234,567.50 in all.", "1234567.5"),
        ("first 1,2,3", "3"),
        ("10-5", "5"),
        ("x = -5", "-5"),
        ("a loss of -$5", "-5"),
        ("−7", "-7"),
        ("**72.00**", "72"),
        ("\\boxed{72}", "72"),
        (".5", "0.5"),
    ],
)
def test_the_last_number_is_read_as_people_write_it(text: str, number: str) -> None:
    assert last_number(text) == Decimal(number)


def test_no_number_is_no_answer() -> None:
    assert last_number("none at all.") is None
    assert exact_answer({"answer": "#### 3"}, "three") == {"correct": False}


def test_an_exact_answer_is_compared_as_a_number() -> None:
    row = {"answer": "He sold 48/2 = <<48/2=24>>24 and 1000.\n#### 1,024"}
    assert exact_answer(row, "So it is $1024.00.") == {"correct": True}
    assert exact_answer(row, "So it is 1024, or 1025.") == {"correct": False}


def test_a_reference_without_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="has no number"):
        exact_answer({"answer": "many"}, "3")


RIGHT = {
    "continuation": BODY,
    "continuation that runs on": BODY + "\n\ndef other(:\n    never closed",
    "continuation and a fence": BODY + "```\nSo it works. ```python\nno",
    "continuation and words": BODY + "This is it, isn't it?",
    "fenced function": f"Sure!\n\n```python\n{FUNCTION}```\nThat's it, isn't it?",
    "fence without language": f"```\n{FUNCTION}```",
    "fence left open": f"Sure:\n```python\n{FUNCTION}",
    "fence left open, cut": f"Sure:\n```python\n{FUNCTION}\n\ndef cut(a, b",
    "fence opened by the prompt": f"{FUNCTION}```\nIt's the middle.",
    "indented fence": "1. So:\n   ```python\n" + "".join(f"   {line}\n" for line in FUNCTION.splitlines()) + "   ```",
    "second fence": f"Run it:\n```bash\npython it.py\n```\n```python\nmiddle([1])\n```\n```py\n{FUNCTION}```",
    "whole prompt repeated": f"```python\n{PROMPT}{BODY}```",
    "no fence": f"Here is the function:\n\n{FUNCTION}\nI hope it's what you want.",
    "fenced body": f"```python\n{BODY}```",
    "fenced body without indentation": "```python\nordered = sorted(values)\nreturn ordered[len(ordered) // 2]\n```",
}
WRONG = {
    "nothing": "",
    "words": "I cannot do that.",
    "wrong": "    return values[0]\n",
    "fenced wrong": "```python\ndef middle(values):\n    return values[0]\n```",
    "under another name": f"```python\n{FUNCTION.replace('middle', 'median')}```",
    "right but later": "    return None\n\n" + FUNCTION,
    "leaves": "    import os\n    os._exit(0)\n",
    "leaves politely": "    raise SystemExit\n",
}


@confined
@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_a_right_function_passes_in_every_dress(text: str) -> None:
    assert GRADERS["humaneval"].score(HUMANEVAL, text) == {"passed": True}


@confined
@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_a_wrong_function_fails(text: str) -> None:
    assert GRADERS["humaneval"].score(HUMANEVAL, text) == {"passed": False}


@confined
@pytest.mark.parametrize(
    ("text", "passed"),
    [
        (LINKS, True),
        (LINKS.replace("\n", "\r\n"), True),
        (f"Sure:\n```python\n{LINKS}```\nwords", True),
        (f"NOTHING = 0\r\n{LINKS.replace('else 0', 'else NOTHING')}", True),
        (f"It's easy.\n{LINKS}\nSo it's done.", True),
        (LINKS.replace("+", "-"), False),
        ("", False),
    ],
)
def test_a_program_of_mbpp_is_set_up_after_its_code(text: str, passed: bool) -> None:
    assert GRADERS["mbpp"].score(MBPP, text) == {"passed": passed}


def test_rows_of_mbpp_need_no_set_up() -> None:
    assert GRADERS["mbpp"].score({"test_list": ["assert one == 1"]}, "one = 1") == {"passed": True}


@confined
@pytest.mark.parametrize(
    ("row", "text", "passed"),
    [
        (LINE, "    place = len(ordered) // 2\n", True),
        (LINE, "    place = len(ordered) // 2", True),  # a stop at the end of the line takes it along
        (LINE, "    place = len(ordered) // 2\n    return 0\n", True),  # ran on
        (LINE, "```python\n    place = half(len(ordered))\n```", True),
        (LINE, "    place = 0\n", False),
        (LINE, "", False),
        (SPAN, SPAN["canonical_solution"], True),
        (SPAN, SPAN["canonical_solution"] + "\n    more((", True),
        (SPAN, "ted(values)\n    place = int(len", False),
    ],
)
def test_a_hole_is_filled_by_as_many_lines_as_it_has(row: dict, text: str, passed: bool) -> None:
    assert GRADERS["infilling"].score(row, text) == {"passed": passed}


def test_rouge_is_one_for_the_reference_and_none_for_other_words() -> None:
    pytest.importorskip("rouge_score")
    row = {"reference": "The cats sat on the mat."}
    assert GRADERS["rouge"].score(row, "the cat sat on the mats") == {"rouge1": 1.0, "rouge2": 1.0, "rougeL": 1.0}
    assert main_score(GRADERS["rouge"].score(row, "nothing alike")) == 0.0
    swapped = GRADERS["rouge"].score(row, "on the mat sat the cats")
    assert swapped["rouge1"] == 1.0
    assert swapped["rougeL"] == pytest.approx(0.5)  # "on the mat" of six words, in both


def test_rouge_without_its_package_tells_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    from saltus.evaluation.benchmarks import graders

    monkeypatch.setattr(graders, "_rouge_scorer", graders._rouge_scorer.__wrapped__)
    for name in ("rouge_score", "rouge_score.rouge_scorer"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r'pip install "\.\[bench\]"'):
        graders.rouge({"reference": "a"}, "a")


def test_every_score_has_its_headline() -> None:
    assert main_score({"passed": True}) == 1.0
    assert main_score({"correct": False}) == 0.0
    assert main_score({"rouge1": 0.5, "rouge2": 0.25, "rougeL": 0.375}) == 0.375
    with pytest.raises(ValueError, match="no headline"):
        main_score({"bleu": 0.3})


def test_graders_name_their_numbers() -> None:
    assert {name: grader.metric_name for name, grader in GRADERS.items()} == {
        "gsm8k": "exact answer",
        "math": "exact answer" if math_answers.HAS_MATH_VERIFY else "exact answer as text",
        "humaneval": "pass@1",
        "mbpp": "pass@1",
        "infilling": "pass@1",
        "rouge": "ROUGE-L",
    }
