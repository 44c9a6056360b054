"""Answers to MATH are found as its evaluation finds them, and compared by value, or as text where that is all."""

import json
from functools import partial

import pytest
from test_cli import lines, saltus_

from saltus.evaluation.benchmarks import graders, math_answers
from saltus.evaluation.benchmarks.math_answers import final_answer, math_answer, normalised_answer, same_answer
from saltus.evaluation.benchmarks.suites import find_grader, load_tasks

SOLUTION = "Since $x = 2$, we get $\\frac{x}{4} = \\boxed{\\frac{1}{2}}$."
HENDRYCKS = {"problem": "What is $2/4$?", "level": "Level 1", "type": "Prealgebra", "solution": SOLUTION}
MATH_500 = {
    "problem": "What is $2/4$?", "solution": SOLUTION, "answer": "\\frac{1}{2}", "subject": "Prealgebra", "level": 1,
    "unique_id": "test/prealgebra/1.json",
}  # fmt: skip
SAME_TEXT = [
    ("\\frac{1}{2}", "\\dfrac12"),
    ("\\frac{1}{2}", "1/2"),
    ("\\frac{1}{2}", "0.5"),
    ("0.25", ".25"),
    ("5", "x = 5"),
    ("5", "$5.00$"),
    ("5", "5."),
    ("32348", "\\$32,348"),
    ("70000", "70{,}000"),
    ("5", "5 \\text{ cm}"),
    ("5", "5\\text{ cm}^2"),
    ("10", "10\\%"),
    ("90", "90^\\circ"),
    ("\\text{Evelyn}", "Evelyn"),
    ("(3,\\frac{\\pi}{2})", "\\left( 3, \\frac{\\pi}{2} \\right)"),
    ("11\\sqrt2", "11\\sqrt{2}"),
    ("-7", "−7"),
]
SAME_VALUE = [
    ("2\\sqrt{3}", "\\sqrt{12}"),
    ("1\\frac{1}{2}", "\\frac{3}{2}"),
    ("2, 3", "3, 2"),
    ("x^2 + 2x + 1", "(x + 1)^2"),
    ("\\frac{3}{4}", "0.75"),
]
OTHER = [
    ("3", "4"),
    ("[2, 5)", "[2, 5]"),
    ("-5", "5"),
    ("\\text{even}", "\\text{odd}"),
    ("\\frac{1}{2}", "\\frac{2}{1}"),
    ("12", "1, 2"),
    ("5", ""),
    ("5", "\\frac{}{"),
    ("1,234", "1.234"),
]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (SOLUTION, "\\frac{1}{2}"),
        ("\\boxed{1} or rather \\boxed{2}.", "2"),
        ("\\boxed{\\left\\{ 1, 2 \\right\\}}", "\\left\\{ 1, 2 \\right\\}"),
        ("so \\fbox{7}", "7"),
        ("so $\\boxed 5$, which", "5"),
        ("\\boxed{3} and \\boxed{\\frac{1}", "3"),  # cut at the length limit
        ("Final Answer: The final answer is $12$. I hope it is correct.", "12"),
        ("The answer is: 3.5. Why?", "3.5"),
        ("the answer is \\(x+1\\)", "x+1"),
        ("there are 12 of them", None),
    ],
)
def test_the_final_answer_is_the_last_box_or_what_is_called_the_answer(text, found):
    assert final_answer(text) == found


@pytest.mark.parametrize(("reference", "answer"), SAME_TEXT)
def test_spellings_of_an_answer_have_one_normal_form(reference, answer):
    assert normalised_answer(reference) == normalised_answer(answer)


@pytest.mark.parametrize(("reference", "answer"), OTHER)
def test_other_answers_are_wrong(reference, answer):
    assert not same_answer(reference, answer)
    assert normalised_answer(reference) != normalised_answer(answer)


@pytest.mark.parametrize(("reference", "answer"), SAME_VALUE)
def test_math_verify_compares_values(reference, answer, monkeypatch):
    pytest.importorskip("math_verify")
    assert same_answer(reference, answer)
    monkeypatch.setattr(math_answers, "HAS_MATH_VERIFY", False)
    assert not same_answer(reference, answer)


@pytest.mark.slow
def test_an_answer_that_cannot_be_computed_ends_as_wrong(monkeypatch):
    pytest.importorskip("math_verify")
    parse, verify = math_answers._math_verify()
    monkeypatch.setattr(math_answers, "_math_verify", lambda: (parse, partial(verify, timeout_seconds=1)))
    assert not same_answer("5", "9^{9^{9^9}}")


def test_a_row_is_graded_by_its_answer_or_by_its_solution():
    for row in (HENDRYCKS, MATH_500):
        assert math_answer(row, "It is $\\boxed{0.5}$.") == {"correct": True}
        assert math_answer(row, "It is $\\boxed{2}$, not 0.5.") == {"correct": False}
        assert math_answer(row, "0.5") == {"correct": False}
    with pytest.raises(ValueError, match="has no answer; give rows an answer"):
        math_answer({"solution": "It is clear."}, "\\boxed{1}")


def test_the_suite_reads_both_forms_and_a_folder_of_files(tmp_path):
    one, two = load_tasks(f"math:{lines(tmp_path / 'rows.jsonl', HENDRYCKS, MATH_500)}")
    assert (one.id, one.category) == ("0", "Prealgebra")
    assert (two.id, two.category) == ("test/prealgebra/1.json", "Prealgebra")
    assert "\\boxed{}" in one.prompt.turns[0]
    for name in ("algebra/2.json", "algebra/1.json", "number_theory/1.json"):
        (tmp_path / "MATH" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "MATH" / name).write_text(json.dumps(HENDRYCKS | {"type": name}, indent=4))
    folder = load_tasks(f"math:{tmp_path / 'MATH'}")
    assert [task.category for task in folder] == ["algebra/1.json", "algebra/2.json", "number_theory/1.json"]
    (tmp_path / "MATH" / "algebra" / "2.json").write_text("{\n")
    with pytest.raises(
        ValueError, match=r"2\.json, line 2: this is not JSON .*; each file of the folder is one object"
    ):
        load_tasks(f"math:{tmp_path / 'MATH'}")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: the field solution is missing"):
        load_tasks(f"math:{lines(tmp_path / 'rows.jsonl', {'problem': 'Why?'})}")


@pytest.mark.slow
def test_a_benchmark_says_when_answers_are_compared_as_text(tiny_folder, tmp_path, monkeypatch):
    suite = f"math:{lines(tmp_path / 'rows.jsonl', HENDRYCKS, MATH_500)}"
    asked = "bench", "-m", tiny_folder(), "--suite", suite, "-n", 4, "--methods", "", "--json"
    for installed, name in ((True, "exact answer"), (False, "exact answer as text")):
        monkeypatch.setattr(graders, "HAS_MATH_VERIFY", installed)
        monkeypatch.setitem(graders.GRADERS, "math", graders._math_grader())
        ran = saltus_(*asked)
        assert ("math-verify is not installed" in ran.stderr) == (not installed)
        told = json.loads(ran.stdout)["methods"]["plain"]
        assert (told["accuracy_of"], told["accuracy"]) == (name, 0.0)
    assert find_grader("math", []) is graders.GRADERS["math"]
