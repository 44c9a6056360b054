"""Measure: every system answers every prompt, in turns, and each answer becomes one record."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saltus.engine.engine import Engine
from saltus.engine.prompts import Conversation
from saltus.engine.text_bounds import PromptTooLongError
from saltus.evaluation.benchmarks.graders import Grader
from saltus.evaluation.benchmarks.infill_requests import hole_request, reads_both_sides
from saltus.evaluation.benchmarks.suites import Task
from saltus.evaluation.benchmarks.systems_under_test import (
    BenchmarkRequest,
    MeasuredAnswer,
    PreparesForText,
    SystemUnderTest,
    early_end_problems,
)

Record = dict[str, Any]

WARM_UP_PROMPT = "Say hello to the world, then say it again, and a third time: hello, world."


@dataclass
class Benchmark:
    """What is measured: the systems (the first is plain), the tasks, the request settings and the grader."""

    engine: Engine
    systems: Sequence[SystemUnderTest]
    tasks: Sequence[Task]
    request_settings: Mapping[str, Any]  # fields of BenchmarkRequest: max_new_tokens, seed, sampling, ignore_eos
    raw: bool = False
    grader: Grader | None = None
    num_seeds: int = 1  # answers to each prompt, from the settings' seed on

    def __post_init__(self) -> None:
        names = Counter(system.name for system in self.systems)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"{twice[0]} is given twice; name each method, baseline and server once")
        baselines = [system.name for system in self.systems if system.kind == "baseline"]
        if baselines and any(map(self._reads_both_sides, self.tasks)):
            raise ValueError(
                f"{baselines[0]} continues texts, but {self.engine.target.name} fills holes here;"
                " leave out baselines and servers"
            )

    def _reads_both_sides(self, task: Task) -> bool:
        return reads_both_sides(self.engine, task, left_only=self.raw)

    def warm_up(self) -> None:
        """Let each system decode a little, so that no first call is measured."""
        for holes in filter(self._reads_both_sides, self.tasks):
            with suppress(PromptTooLongError):
                request = hole_request(self.engine, holes, dict(self.request_settings))
                break
        else:
            request = self._new_request(WARM_UP_PROMPT, False, (), self.request_settings)
        few = min(16, request.max_new_tokens)
        for system in self.systems:
            system.to_answer(request, system.generate(dataclasses.replace(request, max_new_tokens=few)))

    def measure_task(self, task_index: int) -> list[Record]:
        """The records of all systems on one task, or one record that says why the task was skipped.

        A task is skipped for all systems if one of its turns is longer than the context of the model, or of a server.
        """
        records: list[Record] = []
        task = self.tasks[task_index]
        try:
            for number in range(self.num_seeds):
                for turn_records in self._measure_turns(task_index, number):
                    records += turn_records
        except PromptTooLongError as error:
            turn = len(records) // len(self.systems) % len(task.prompt.turns or (0,))
            return [{"task": task.id, "category": task.category, "turn": turn, "skipped": str(error)}]
        return records

    def _measure_turns(self, task_index: int, seed_number: int) -> Iterator[list[Record]]:
        """The records of each turn; each task, and each seed, starts with another system.

        Plain decoding's answer enters the next turn of all systems, so that all read the same.
        """
        task = self.tasks[task_index]
        raw = task.raw is not None and (self.raw or task.always_raw or not self.engine.tokenizer.chat_template)
        settings = {**self.request_settings, "seed": self.request_settings["seed"] + seed_number}
        first = (task_index + seed_number) % len(self.systems)
        order = [*self.systems[first:], *self.systems[:first]]
        conversation = Conversation(task.prompt)
        for turn, (shown, prompt) in enumerate(_conversation_turns(task, conversation, raw)):
            if self._reads_both_sides(task):
                request = hole_request(self.engine, task, settings)
            else:
                request = self._new_request(prompt, raw, task.stop if raw else (), settings)
            made = {}
            for system in order:
                if isinstance(system, PreparesForText):
                    system.prepare(request)
                started = time.perf_counter()
                answer = system.generate(request)
                made[system.name] = answer, time.perf_counter() - started
            records = []
            for system in self.systems:
                answer, seconds = made[system.name]
                written = system.to_answer(request, answer)
                records.append({"prompt": shown} | self._record(task, turn, system, request, written, seconds))
                if system is self.systems[0]:
                    conversation.add_answer("".join(written.pieces))
            yield records

    def _new_request(
        self, prompt: Any, raw: bool, stop: tuple[str, ...], settings: Mapping[str, Any]
    ) -> BenchmarkRequest:
        raw = raw or not self.engine.tokenizer.chat_template
        tokens = self.engine.text_request(prompt, raw=raw).request.prompt  # refuses a prompt that is too long
        return BenchmarkRequest(prompt, tuple(tokens), raw, stop, **settings)

    def _record(
        self,
        task: Task,
        turn: int,
        system: SystemUnderTest,
        request: BenchmarkRequest,
        answer: MeasuredAnswer,
        seconds: float,
    ) -> Record:
        context = self.engine.target.context_length
        available_tokens = None if context is None else context - len(request.prompt_tokens)
        ends = self.engine.target.end_tokens | request.end_tokens
        if request.template is not None:
            ends, available_tokens = frozenset(() if request.hole_end is None else (request.hole_end,)), None
        early = early_end_problems(request, answer, ends, available_tokens)
        last = turn == len(task.prompt.turns or (0,)) - 1
        score = self.grader.score(task.reference, "".join(answer.pieces)) if self.grader and last else None
        return {
            "task": task.id, "category": task.category, "turn": turn, "seed": request.seed,
            "system": system.name, "kind": system.kind,
            "prompt_tokens": len(request.prompt_tokens), "tokens": answer.tokens,
            "new_tokens": len(answer.tokens) if answer.new_tokens is None else answer.new_tokens,
            "pieces": answer.pieces, "finish_reason": answer.finish_reason, "seconds": seconds,
            "prefill_seconds": answer.prefill_seconds, "draft_calls": answer.draft_calls,
            "calls": None if answer.calls is None else [dataclasses.asdict(call) for call in answer.calls],
            "acceptance": {name: dataclasses.asdict(histogram) for name, histogram in answer.acceptance.items()},
            "problems": answer.problems + (early if system.kind == "method" else []),
            "score": score, "accuracy_of": self.grader and self.grader.metric_name,
            "other_rng": not request.sampling.greedy and (
                system.kind == "baseline" or (self.engine.decoder.rule == "reject" and system is not self.systems[0])
            ),
        }  # fmt: skip


def _conversation_turns(task: Task, conversation: Conversation, raw: bool) -> Iterator[tuple[str, Any]]:
    """For each turn: the prompt as records show it, and the prompt for the engine."""
    if raw:
        yield str(task.raw), task.raw
        return
    for inputs in conversation.turns():
        yield inputs.shown_prompt if isinstance(inputs.shown_prompt, str) else task.prompt.preview, inputs.prompt


@dataclass
class BenchmarkRecords:
    """Records on disk, one line each; finished tasks are not measured again."""

    records: list[Record]
    run_info: Mapping[str, Any]  # command, date, commit, machine, model of its first start
    file: Path | None = None

    @property
    def num_finished_tasks(self) -> int:
        """How many tasks have been measured or skipped."""
        return len({record["task"] for record in self.records})

    @property
    def answers(self) -> list[Record]:
        """The records of measured tasks."""
        return [record for record in self.records if "skipped" not in record]

    @property
    def skipped(self) -> list[Record]:
        """The records of skipped tasks, one for each."""
        return [record for record in self.records if "skipped" in record]

    def append(self, records: Sequence[Record]) -> None:
        """Add all records of one task."""
        self.records += records
        if self.file is not None:
            with open(self.file, "a", encoding="utf-8") as out:
                out.write("".join(json.dumps(record) + "\n" for record in records))
                out.flush()
                os.fsync(out.fileno())


def make_folder(folder: Path) -> None:
    """Make the folder of results, unless it is there. Errors: ValueError where there can be none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"--out {folder} is a file; give a folder") from None
    except OSError as error:
        raise ValueError(f"--out {folder} cannot be made ({error.strerror}); give another folder") from None


def open_records(
    folder: Path | None,
    plan: Mapping[str, Any],
    tasks: Sequence[Task],
    run_info: Mapping[str, Any],
    fresh: bool = False,
) -> BenchmarkRecords:
    """Start a run, or continue an interrupted run of the same plan at the same commit.

    `plan` identifies the run and names its "systems". Errors: ValueError if the folder holds another run (unless
    `fresh`) or a damaged file.
    """
    if folder is None:
        return BenchmarkRecords([], run_info)
    file, kept = folder / "records.jsonl", folder / "plan.json"
    make_folder(folder)
    before = _read_plan(kept) if kept.exists() and not fresh else None
    begun = before.pop("environment") if before else run_info
    if before is not None and before != plan:
        key = next(key for key in [*plan, *before] if plan.get(key) != before.get(key))
        was, now = (_abbreviate(each.get(key)) for each in (before, plan))
        what = f"{key}: {was}, now {now}"
        if key == "tasks":
            what = "other tasks or references than those of this --suite and --limit"
        raise ValueError(f"{folder} holds another run ({what}); give another --out, or --fresh to measure anew")
    if before is None:
        file.unlink(missing_ok=True)
        kept.write_text(json.dumps({**plan, "environment": run_info}, indent=1))
    texts = plan.get("seeds", 1)
    needed = {task.id: texts * len(task.prompt.turns or (0,)) * len(plan["systems"]) for task in tasks}
    records = BenchmarkRecords(_read_complete_tasks(file, needed), begun, file)
    if records.num_finished_tasks < len(tasks):
        for what, was, now in _conditions(begun, run_info):
            if was != now:
                raise ValueError(
                    f"{folder} was begun {what} {was}, and this is {now};"
                    " give another --out, or --fresh to measure anew"
                )
    return records


def _conditions(begun: Mapping[str, Any], run_info: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What one run's seconds have in common, as it was begun with and now."""
    yield "at commit", begun["commit"], run_info["commit"]
    packages = [info.get("packages") or {} for info in (begun, run_info)]
    for name in {**packages[0], **packages[1]}:
        was, now = (each.get(name) for each in packages)
        yield f"with {name} of", was, now
    machines = [info.get("machine") or {} for info in (begun, run_info)]
    libraries = ((f"with {name}", name) for name in ("torch", "transformers", "saltus"))
    counts = (("with a number of cores of", "cores"), ("with a number of threads of", "threads"))
    for what, name in (("on", "processor"), *counts, ("on", "gpu"), *libraries):
        was, now = (machine.get(name) for machine in machines)
        yield what, was, now


def _read_complete_tasks(file: Path, records_per_task: Mapping[str, int]) -> list[Record]:
    """The records of a file up to an unfinished task, which is removed from the file. Errors: ValueError."""
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    records = [
        _read_record(line, f"{file}, line {number}") for number, line in enumerate(lines, 1) if line.endswith(b"\n")
    ]
    last = records[-1] if records else None
    if last is not None and "skipped" not in last:
        begun = sum(record["task"] == last["task"] for record in records)
        if begun < records_per_task[last["task"]]:
            del records[-begun:]
    if len(records) < len(lines):
        file.write_bytes(b"".join(lines[: len(records)]))
    return records


def _read_record(line: bytes, location: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or "task" not in record:
        raise ValueError(f"{location} is damaged; delete this line and all below it, or give --fresh to measure anew")
    return record


def _read_plan(file: Path) -> dict[str, Any]:
    try:
        plan = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        plan = None
    if not isinstance(plan, dict) or "environment" not in plan:
        raise ValueError(f"{file} is damaged; give another --out, or --fresh to measure anew")
    return plan


def _abbreviate(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 40 else text[:37] + "…"
