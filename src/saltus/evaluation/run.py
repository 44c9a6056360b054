"""Measure: every side writes every prompt, in turns, and each answer becomes a line of records."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saltus.engine import Engine
from saltus.evaluation.graders import Grader
from saltus.evaluation.sides import Question, Side, Written, ended_early
from saltus.evaluation.suites import Task
from saltus.prompts import Conversation

Record = dict[str, Any]

WARM = "Say hello to the world, then say it again, and a third time: hello, world."


@dataclass
class Bench:
    """What is measured: the sides (the first is plain), the tasks, and how answers are written and graded."""

    engine: Engine
    sides: Sequence[Side]
    tasks: Sequence[Task]
    writing: Mapping[str, Any]  # fields of Question: max_new_tokens, seed, sampling, ignore_eos
    raw: bool = False
    grader: Grader | None = None

    def warm_up(self) -> None:
        """Let each side write a little, so that no first call counts."""
        question = self._question(WARM, False, ())
        few = min(16, question.max_new_tokens)
        for side in self.sides:
            side.account(question, side.write(dataclasses.replace(question, max_new_tokens=few)))

    def measure(self, number: int) -> list[Record]:
        """All sides on one task, turn by turn; the side that begins is another one for each task.

        What plain decoding answered enters the next turn of all of them, so that all read the same.
        """
        task, found = self.tasks[number], []
        raw = task.raw is not None and (self.raw or task.always_raw or not self.engine.tokenizer.chat_template)
        first = number % len(self.sides)
        order = [*self.sides[first:], *self.sides[:first]]
        conversation = Conversation(task.prompt)
        for turn, (said, given) in enumerate(_turns(task, conversation, raw)):
            question = self._question(given, raw, task.stop if raw else ())
            made = {}
            for side in order:
                started = time.perf_counter()
                answer = side.write(question)
                made[side.name] = answer, time.perf_counter() - started
            for side in self.sides:
                answer, seconds = made[side.name]
                written = side.account(question, answer)
                found.append({"asked": said} | self._record(task, turn, side, question, written, seconds))
                if side is self.sides[0]:
                    conversation.answered("".join(written.pieces))
        return found

    def _question(self, given: Any, raw: bool, stop: tuple[str, ...]) -> Question:
        raw = raw or not self.engine.tokenizer.chat_template
        return Question(given, tuple(self.engine.encode(given, raw)), raw, stop, **self.writing)

    def _record(
        self, task: Task, turn: int, side: Side, question: Question, written: Written, seconds: float
    ) -> Record:
        context = self.engine.target.context
        room = None if context is None else context - len(question.tokens)
        early = ended_early(question, written, self.engine.target.ends, room)
        last = turn == len(task.prompt.turns or (0,)) - 1
        score = self.grader.score(task.reference, "".join(written.pieces)) if self.grader and last else None
        return {
            "task": task.id, "category": task.category, "turn": turn, "side": side.name, "kind": side.kind,
            "prompt_tokens": len(question.tokens), "tokens": written.tokens,
            "new_tokens": len(written.tokens) if written.new_tokens is None else written.new_tokens,
            "pieces": written.pieces, "finish_reason": written.finish_reason, "seconds": seconds,
            "prefill_seconds": written.prefill_seconds, "draft_calls": written.draft_calls,
            "calls": None if written.calls is None else [dataclasses.asdict(call) for call in written.calls],
            "problems": written.problems + (early if side.kind == "method" else []),
            "score": score, "accuracy_of": self.grader and self.grader.of,
            "other_dice": side.kind == "peer" and not question.sampling.greedy,
        }  # fmt: skip


def _turns(task: Task, conversation: Conversation, raw: bool) -> Iterator[tuple[str, Any]]:
    """What is asked in each turn, and what the engine is given for it."""
    if raw:
        yield str(task.raw), task.raw
        return
    for ask in conversation.asks():
        yield ask.said if isinstance(ask.said, str) else task.prompt.opening, ask.given


@dataclass
class Notebook:
    """Records on disk, a line each; a task that was measured before is not measured again."""

    records: list[Record]
    circumstances: Mapping[str, Any]  # command, date, commit, machine, model, of when it began
    file: Path | None = None

    @property
    def done(self) -> int:
        """Tasks that are measured."""
        return len({record["task"] for record in self.records})

    def add(self, records: Sequence[Record]) -> None:
        """Keep all records of one more task."""
        self.records += records
        if self.file is not None:
            with open(self.file, "a", encoding="utf-8") as out:
                out.write("".join(json.dumps(record) + "\n" for record in records))
                out.flush()
                os.fsync(out.fileno())


def open_notebook(
    folder: Path | None,
    plan: Mapping[str, Any],
    tasks: Sequence[Task],
    circumstances: Mapping[str, Any],
    fresh: bool = False,
) -> Notebook:
    """Begin, or go on where a run of the same plan was interrupted, at the same commit.

    `plan` says what the run is, its "sides" among it; a folder that holds another is a ValueError, unless `fresh`.
    """
    if folder is None:
        return Notebook([], circumstances)
    file, kept = folder / "records.jsonl", folder / "plan.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"--out {folder} is a file; give a folder") from None
    before = json.loads(kept.read_text()) if kept.exists() and not fresh else None
    begun = before.pop("circumstances") if before else circumstances
    if before is not None and before != plan:
        key = next(key for key in [*plan, *before] if plan.get(key) != before.get(key))
        was, now = (_short(each.get(key)) for each in (before, plan))
        raise ValueError(
            f"{folder} holds another run ({key}: {was}, now {now}); give another --out, or --fresh to measure anew"
        )
    if before is None:
        file.unlink(missing_ok=True)
        kept.write_text(json.dumps({**plan, "circumstances": circumstances}, indent=1))
    needed = {task.id: len(task.prompt.turns or (0,)) * len(plan["sides"]) for task in tasks}
    notebook = Notebook(_whole_tasks(file, needed), begun, file)
    if notebook.done < len(tasks) and begun["commit"] != circumstances["commit"]:
        raise ValueError(
            f"{folder} was begun at commit {begun['commit']}, and this is {circumstances['commit']};"
            " give another --out, or --fresh to measure anew"
        )
    return notebook


def _whole_tasks(file: Path, needed: Mapping[str, int]) -> list[Record]:
    """The records of a file up to a task that was cut off, which is taken away from the file."""
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith(b"\n")]
    last = records[-1]["task"] if records else None
    begun = sum(record["task"] == last for record in records)
    if last is not None and begun < needed[last]:
        del records[-begun:]
    if len(records) < len(lines):
        file.write_bytes(b"".join(lines[: len(records)]))
    return records


def _short(value: Any) -> str:
    said = json.dumps(value)
    return said if len(said) < 40 else said[:37] + "…"
