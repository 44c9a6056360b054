"""Suites read tasks from files and data sets, and name the line where a row is wrong."""

import gzip
import json
import sys
from types import SimpleNamespace

import pytest

from saltus.evaluation.benchmarks import suites
from saltus.evaluation.benchmarks.suites import SUITES, find_grader, load_tasks, tasks_fingerprint

SPEC = {"question_id": 82, "category": "writing", "turns": ["Write.", "Again."]}
CODE = {
    "task_id": "HumanEval/0", "prompt": "def f(x):\n", "entry_point": "f", "test": "def check(f):\n    assert f(1)\n",
    "canonical_solution": "    return x\n", "suffix": "",
}  # fmt: skip
MBPP = {"task_id": 3, "text": "Write f.", "code": "f = 1", "test_list": ["assert f == 1"], "test_setup_code": ""}
MATH = {"question": "1 + 1?", "answer": "#### 2"}
ROWS = {
    "spec-bench": SPEC, "humaneval": CODE, "mbpp": MBPP, "gsm8k": MATH,
    "infilling": CODE | {"task_id": "SingleLineInfilling/HumanEval/0/L0"},
}  # fmt: skip


def lines(path, *rows):
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz"])
def test_each_suite_reads_its_rows(name, kind, tmp_path):
    ids = {"question_id": 83} if name == "spec-bench" else {"task_id": 4 if name == "mbpp" else "Other/1"}
    file = lines(tmp_path / f"rows.{kind}", ROWS[name], ROWS[name] | ids)
    tasks = load_tasks(f"{name}:{file}")
    assert len(tasks) == 2
    assert tasks[0].prompt.turns
    assert (find_grader(f"{name}:{file}", tasks) is None) == (name == "spec-bench")


def test_tasks_with_one_id_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"2 tasks have the id 82; give each one of its own"):
        load_tasks(f"spec-bench:{lines(tmp_path / 'a.jsonl', SPEC, SPEC | {'turns': ['Other.']})}")


def test_all_turns_of_spec_bench_are_asked(tmp_path):
    (task,) = load_tasks(f"spec-bench:{lines(tmp_path / 'a.jsonl', SPEC)}")
    assert (task.id, task.category, task.prompt.turns) == ("82", "writing", ("Write.", "Again."))


def test_what_is_continued_raw_is_the_row_s_own_text(tmp_path):
    (task,) = load_tasks(f"infilling:{lines(tmp_path / 'a.jsonl', ROWS['infilling'])}")
    assert task.always_raw
    assert (task.raw, task.stop) == (CODE["prompt"], ("\n",))


def test_a_limit_is_spread_over_the_suite(tmp_path):
    rows = [SPEC | {"question_id": n, "category": "abcd"[n // 10]} for n in range(40)]
    file = lines(tmp_path / "a.jsonl", *rows)
    tasks = load_tasks(f"spec-bench:{file}", 8)
    assert [task.category for task in tasks] == list("aabbccdd")
    assert len(load_tasks(f"spec-bench:{file}", 100)) == 40
    assert len({tasks_fingerprint(load_tasks(f"spec-bench:{file}", n)) for n in (7, 8, 40)}) == 3


def test_the_quick_suite_has_several_kinds():
    tasks = load_tasks("quick")
    assert len(tasks) == 24
    assert len({task.category for task in tasks}) == 8


def test_prompts_of_a_file_may_carry_category_and_reference(tmp_path):
    rows = [
        {"prompt": "Sum up.", "reference": "It ends.", "category": "short"},
        {"turns": ["a", "b"], "reference": "c"},
    ]
    spec = f"prompts:{lines(tmp_path / 'a.jsonl', *rows)}"
    one, two = load_tasks(spec)
    assert (one.category, one.reference) == ("short", {"reference": "It ends."})
    assert two.category == "prompts"
    grader = find_grader(spec, [one, two])
    assert grader is not None
    assert grader.metric_name == "ROUGE-L"
    assert find_grader(spec, [one, load_tasks("quick")[0]]) is None


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("spec-bench", {"question_id": 1, "category": "x"}, "line 2: the field turns is missing; a row of spec-bench"),
        ("spec-bench", SPEC | {"turns": []}, "line 2: turns must be of type list and not empty"),
        ("spec-bench", SPEC | {"turns": ["a", 3]}, "line 2: turns must be a list of texts"),
        ("gsm8k", {"question": "?"}, "line 2: the field answer is missing"),
        ("mbpp", MBPP | {"task_id": "three"}, "line 2: task_id must be of type int"),
        ("humaneval", {**CODE, "prompt": ""}, "line 2: prompt is empty"),
        ("gsm8k", [1], "line 2: this is no JSON object"),
        ("gsm8k", "{", "line 2: this is not JSON"),
    ],
)
def test_a_wrong_row_is_named_with_its_file_and_line(name, row, said, tmp_path):
    file = lines(tmp_path / "rows.jsonl", ROWS[name], row)
    with pytest.raises(ValueError, match=f"rows.jsonl, {said}"):
        load_tasks(f"{name}:{file}")


def test_a_file_that_is_cut_or_empty_or_not_text_is_told(tmp_path):
    whole = lines(tmp_path / "whole.jsonl.gz", MATH)
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(whole.read_bytes()[:20])
    with pytest.raises(ValueError, match="not a whole gzip file"):
        load_tasks(f"gsm8k:{cut}")
    with pytest.raises(ValueError, match="holds no tasks"):
        load_tasks(f"gsm8k:{lines(tmp_path / 'empty.jsonl')}")
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b"{}\n\xff\n")
    with pytest.raises(ValueError, match=r"line 2: this is not UTF-8"):
        load_tasks(f"gsm8k:{latin}")
    with pytest.raises(ValueError, match="is a folder"):
        load_tasks(f"gsm8k:{tmp_path}")


def test_unknown_names_get_the_nearest():
    with pytest.raises(ValueError, match="did you mean spec-bench"):
        load_tasks("spec_bench:x.jsonl")
    with pytest.raises(ValueError, match=f"there are {', '.join(SUITES)} and prompts:FILE"):
        load_tasks("zzz")


def test_a_data_set_is_asked_for_by_name_configuration_and_split(monkeypatch):
    inputs = []

    def load_dataset(*names, **settings):
        inputs.append((names, settings))
        return [MATH]

    monkeypatch.setattr(suites, "hub_answers", lambda name: True)
    fake = SimpleNamespace(load_dataset=load_dataset, disable_progress_bars=lambda: None)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    for spec in ("gsm8k", "gsm8k:owner/name", "gsm8k:owner/name:hard@train", "gsm8k:https://somewhere/rows.jsonl"):
        assert len(load_tasks(spec)) == 1
    assert inputs == [
        (("openai/gsm8k", "main"), {"split": "test"}),
        (("owner/name", None), {"split": "test"}),
        (("owner/name", "hard"), {"split": "train"}),
        (("json",), {"data_files": "https://somewhere/rows.jsonl", "split": "train"}),
    ]


def test_a_data_set_that_cannot_be_had_is_told_in_a_line(monkeypatch):
    """The library is not asked to try again and again where the hub is silent."""
    asked, config = [], SimpleNamespace(HF_HUB_OFFLINE=False)

    def load_dataset(*names, **settings):
        assert config.HF_HUB_OFFLINE
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(suites, "hub_answers", lambda name: asked.append(name))
    fake = SimpleNamespace(load_dataset=load_dataset, disable_progress_bars=lambda: None, config=config)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    with pytest.raises(ValueError, match=r"cannot be had \(no route\); give a file: --suite gsm8k:FILE"):
        load_tasks("gsm8k")
    assert asked == ["openai/gsm8k"]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r'pip install "\.\[bench\]"'):
        load_tasks("gsm8k")


def test_references_and_suffixes_are_part_of_a_selection(tmp_path):
    prints = []
    for number, changes in enumerate(({}, {"test": "def check(f): pass\n"}, {"suffix": "f(2)"})):
        file = lines(tmp_path / f"{number}.jsonl", ROWS["infilling"] | changes)
        prints.append(tasks_fingerprint(load_tasks(f"infilling:{file}")))
    assert len(set(prints)) == 3
