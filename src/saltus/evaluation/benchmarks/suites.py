"""Load the tasks of a suite: from a file, from a dataset of the hub, or those that come with the package."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib.resources import files
from pathlib import Path
from typing import Any

from saltus.engine.prompts import Prompt, read_prompts_file
from saltus.engine.text_files import parse_jsonl, read_jsonl, read_text
from saltus.evaluation.benchmarks.graders import GRADERS, Grader
from saltus.loading.fetching import first_line
from saltus.loading.hub import hub_answers

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A prompt, and the row by which its answer is graded."""

    id: str
    category: str
    prompt: Prompt
    raw: str | None = None  # the text to continue by a model without chat template
    always_raw: bool = False  # continue it even with a chat template
    stop: tuple[str, ...] = ()  # stop strings for raw continuation
    suffix: str | None = None  # the text after the hole that stands after `raw`, for models that read both sides
    hole: str = ""  # what the reference has there: its length, for models that cannot end a hole
    reference: Mapping[str, Any] = field(default_factory=dict)  # fields of the row, for the grader


@dataclass(frozen=True)
class Suite:
    """A named suite: its default location, the fields that a row needs, and how a row becomes a task."""

    name: str
    description: str
    default_source: str | None  # a data set or an address; None: it comes with the package
    required_fields: Mapping[str, type]
    make_task: Callable[[Row, int], Task]
    grader_name: str | None = None


def _spec_bench(row: Row, number: int) -> Task:
    return Task(str(row["question_id"]), row["category"], Prompt(tuple(row["turns"])))


def _quick(row: Row, number: int) -> Task:
    return Task(str(number), row["category"], Prompt((row["prompt"],)))


def _humaneval(row: Row, number: int) -> Task:
    inputs = f"Complete this Python function. Answer with the whole function.\n\n```python\n{row['prompt']}```"
    return Task(row["task_id"], "code", Prompt((inputs,)), row["prompt"], stop=_CODE_STOP_STRINGS, reference=row)


def _mbpp(row: Row, number: int) -> Task:
    tests = "\n".join(row["test_list"])
    inputs = f"{row['text']}\nAnswer with Python code that passes these tests:\n\n```python\n{tests}\n```"
    raw = f'"""\n{row["text"]}\n{tests}\n"""\n'
    return Task(str(row["task_id"]), "code", Prompt((inputs,)), raw, stop=_CODE_STOP_STRINGS, reference=row)


def _gsm8k(row: Row, number: int) -> Task:
    inputs = f"{row['question']}\nThink step by step. End with #### and the number."
    raw = f"Question: {row['question']}\nAnswer:"
    return Task(str(number), "math", Prompt((inputs,)), raw, stop=("\nQuestion:",), reference=row)


def _math(row: Row, number: int) -> Task:
    inputs = f"{row['problem']}\nThink step by step. Put the final answer in \\boxed{{}}."
    raw = f"Problem:\n{row['problem']}\n\nSolution:\n"
    subject = row.get("subject") or row.get("type") or "math"  # as in MATH-500, as in MATH
    name = str(row.get("unique_id", number))
    return Task(name, subject, Prompt((inputs,)), raw, stop=("\nProblem:",), reference=row)


def _infilling(row: Row, number: int) -> Task:
    kind = row["task_id"].partition("/")[0]
    stop = ("\n",) if kind.startswith("SingleLine") else ()
    prompt, hole = Prompt((row["prompt"],)), row["canonical_solution"]
    end = "\n" if hole.endswith("\n") else ""  # of whole lines the last end is given
    return Task(
        row["task_id"], kind, prompt, row["prompt"], always_raw=True, stop=stop, suffix=end + row["suffix"],
        hole=hole.removesuffix("\n"), reference=row,
    )  # fmt: skip


_SPEC_BENCH_URL = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
_INFILLING_URL = (
    "https://raw.githubusercontent.com/openai/human-eval-infilling/master/data/HumanEval-SingleLineInfilling.jsonl.gz"
)
_CODE_STOP_STRINGS = ("\ndef ", "\nclass ", "\nif ", "\nprint(", "\n#", '\n"""')
_CODE_FIELDS = {"task_id": str, "prompt": str, "test": str, "entry_point": str}
SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "quick", "two dozen prompts of eight kinds that come with Saltus", None, {"category": str, "prompt": str},
            _quick,
        ),
        Suite(
            "spec-bench", "Spec-Bench (Xia et al. 2024): 13 categories, all turns", _SPEC_BENCH_URL,
            {"question_id": int, "category": str, "turns": list}, _spec_bench,
        ),
        Suite(
            "humaneval", "HumanEval (Chen et al. 2021), pass@1", "openai/openai_humaneval@test", _CODE_FIELDS,
            _humaneval, "humaneval",
        ),
        Suite(
            "mbpp", "MBPP (Austin et al. 2021), pass@1", "google-research-datasets/mbpp:full@test",
            {"task_id": int, "text": str, "test_list": list}, _mbpp, "mbpp",
        ),
        Suite(
            "gsm8k", "GSM8K (Cobbe et al. 2021), exact answers", "openai/gsm8k:main@test",
            {"question": str, "answer": str}, _gsm8k, "gsm8k",
        ),
        Suite(
            "math", "MATH (Hendrycks et al. 2021), the 500 problems of Lightman et al. (2023), exact answers",
            "HuggingFaceH4/MATH-500@test", {"problem": str, "solution": str}, _math, "math",
        ),
        Suite(
            "infilling", "HumanEval infilling (Bavarian et al. 2022), pass@1; models that can read both sides",
            _INFILLING_URL, _CODE_FIELDS | {"suffix": str, "canonical_solution": str}, _infilling, "infilling",
        ),
    )
}  # fmt: skip


def find_suite(spec: str) -> Suite | None:
    """The suite of a name like `humaneval:FILE`; None for `prompts:FILE`. Errors: ValueError of one line."""
    name, _, where = spec.partition(":")
    if name == "prompts":
        if not where:
            raise ValueError("suite prompts needs a file: prompts:FILE, JSON lines with prompt, messages or turns")
        return None
    if name not in SUITES:
        near = difflib.get_close_matches(name, [*SUITES, "prompts"], n=2, cutoff=0.4)
        offer = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(SUITES)} and prompts:FILE"
        raise ValueError(f"unknown suite {name!r}; {offer}")
    return SUITES[name]


def load_tasks(spec: str, limit: int | None = None) -> list[Task]:
    """The tasks of `NAME` or `NAME:WHERE`, WHERE being a file or a dataset (`owner/name:configuration@split`).

    `limit` takes so many, evenly spread, so that every category keeps its share. Errors: ValueError of one line.
    """
    suite, where = find_suite(spec), spec.partition(":")[2]
    if suite is None:
        tasks = [_prompt_task(prompt, number) for number, prompt in enumerate(read_prompts_file(Path(where)))]
    else:
        tasks = [
            _checked_task(suite, row, number, place) for number, (place, row) in enumerate(_read_rows(suite, where))
        ]
    if not tasks:
        raise ValueError(f"{where or spec} holds no tasks; give a file with a JSON object a line")
    (commonest, times), *_ = Counter(task.id for task in tasks).most_common(1)
    if times > 1:
        raise ValueError(f"{where or spec}: {times} tasks have the id {commonest}; give each one of its own")
    count = len(tasks) if limit is None else min(limit, len(tasks))
    return [tasks[number * len(tasks) // count] for number in range(count)]


def suite_label(spec: str) -> str:
    """The name of a suite for results; of a file only its base name."""
    name, _, where = spec.partition(":")
    return f"{name} ({Path(where).name})" if where else name


def tasks_fingerprint(tasks: list[Task]) -> str:
    """A digest that identifies a selection of tasks."""
    parts = [(task.id, task.prompt, task.raw, task.suffix, dict(task.reference)) for task in tasks]
    return blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def find_grader(spec: str, tasks: list[Task]) -> Grader | None:
    """The grader of a suite; for prompts of a file ROUGE, if each has a reference."""
    suite = find_suite(spec)
    if suite is None:
        return GRADERS["rouge"] if all("reference" in task.reference for task in tasks) else None
    return GRADERS[suite.grader_name] if suite.grader_name else None


def _prompt_task(prompt: Prompt, number: int) -> Task:
    category, reference = prompt.record.get("category"), prompt.record.get("reference")
    graded = {"reference": reference} if isinstance(reference, str) else {}
    return Task(str(number), category if isinstance(category, str) else "prompts", prompt, reference=graded)


def _checked_task(suite: Suite, row: Any, number: int, location: str) -> Task:
    if not isinstance(row, dict):
        raise ValueError(f"{location}: this is no JSON object; {suite.name} has one a line")
    for name, kind in suite.required_fields.items():
        if name not in row:
            raise ValueError(
                f"{location}: the field {name} is missing; a row of {suite.name} has {', '.join(suite.required_fields)}"
            )
        if not isinstance(row[name], kind) or row[name] == []:
            raise ValueError(
                f"{location}: {name} must be of type {kind.__name__} and not empty, but is {row[name]!r:.40}"
            )
        if kind is list and not all(isinstance(item, str) and item for item in row[name]):
            raise ValueError(f"{location}: {name} must be a list of texts that are not empty")
    if name := next((name for name in ("prompt", "question", "problem", "text") if row.get(name) == ""), None):
        raise ValueError(f"{location}: {name} is empty; there is nothing to ask")
    return suite.make_task(row, number)


def _read_rows(suite: Suite, source: str) -> Iterator[tuple[str, Any]]:
    """Each row with its location for error messages."""
    if not source and suite.default_source is None:
        text = (files("saltus.evaluation.benchmarks") / f"{suite.name}.jsonl").read_text(encoding="utf-8")
        yield from parse_jsonl(text, f"{suite.name}.jsonl")
        return
    source = source or str(suite.default_source)
    path = Path(source).expanduser()
    if path.is_file():
        yield from read_jsonl(path)
    elif path.is_dir() and (rows := sorted(path.rglob("*.json"))):  # as MATH is published: a row a file
        for file in rows:
            yield str(file), _parse_row(read_text(file), str(file))
    elif path.exists() or (path.suffix in (".jsonl", ".json", ".gz", ".csv") and "://" not in source):
        problem = "is a folder" if path.exists() else "does not exist"
        raise ValueError(f"{path} {problem}; suite {suite.name} takes a file of JSON lines or the name of a data set")
    else:
        yield from _load_dataset(suite, source)


def _parse_row(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{name}, line {error.lineno}: this is not JSON ({error.msg}); each file of the folder is one object"
        ) from None


def _load_dataset(suite: Suite, source: str) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ModuleNotFoundError:
        raise ValueError(
            f'suite {suite.name} is a data set: pip install ".[bench]" in the clone, or give a file, {suite.name}:FILE'
        ) from None
    datasets.disable_progress_bars()
    try:
        if "://" in source:
            rows = datasets.load_dataset("json", data_files=source, split="train")
        else:
            name, _, split = source.partition("@")
            name, _, configuration = name.partition(":")
            if not hub_answers(name):  # else the library asks again for a minute, and prints each time
                from datasets import config

                config.HF_HUB_OFFLINE = True
            rows = datasets.load_dataset(name, configuration or None, split=split or "test")
    except Exception as error:  # of many kinds: no network, no such name, no such split
        reason = first_line(error)
        raise ValueError(f"{source} cannot be had ({reason}); give a file: --suite {suite.name}:FILE") from None
    for number, row in enumerate(rows):
        yield f"{source}, row {number}", dict(row)
