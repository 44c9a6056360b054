"""Run the parts of a stage, each with a time limit, and write each result as a JSON line at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

LIMIT_SHARE = 3  # a part may take so many times its even share of the minutes that are left
MAX_LOSSES = 2  # of the device: a part that it did not survive so often is left out


@dataclass(frozen=True)
class Part:
    """A measurement of seconds, whose result is a line of the file; or what others need, set up in every process."""

    facts: dict[str, Any]  # what is measured: its name, and columns of a table
    run: Callable[[], dict[str, Any]]
    prepares: dict[str, Any] | None = None  # facts of the parts that need it; it runs if one of them is left
    least_seconds: float = 0  # that it may take, if they are left

    @property
    def name(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.facts.items())


class Overran(BaseException):
    """A part took longer than it may. Code that catches every Exception must not catch this."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise Overran in the main thread after so many seconds, also while it waits. SIGALRM is left to pytest."""

    def end(*_: Any) -> None:
        raise Overran(f"took more than {seconds:.3g} s")

    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGUSR1, end)
    timer = threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGUSR1))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGUSR1, before)


class ResultFile:
    """The JSON lines of one stage: a line for each run, and for each part when it starts and when it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = read_lines(path) if path.is_file() else []

    def begin(self, stage: str, settings: dict[str, Any], facts: dict[str, Any]) -> None:
        """Start or continue the file. Errors: ValueError if it is of another stage, other settings or another GPU."""
        new = {"stage": stage, "settings": settings, **facts}
        for old in (line["run"] for line in self.lines if "run" in line):
            for name, before, now in (
                ("stage", old["stage"], stage), ("settings", old["settings"], settings),
                ("GPU", old["machine"]["gpu"], facts["machine"]["gpu"]),
            ):  # fmt: skip
                if before != now:
                    raise ValueError(f"{self.path} is of another {name}, {before} not {now}; give another --out")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(f"{json.dumps(line)}\n" for line in self.lines))  # without half a last line
        self.append({"run": new})

    def append(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")  # flushed as the file is closed

    def finished(self) -> dict[str, dict[str, Any]]:
        """The results of parts by name, each with its facts."""
        return {line["part"]: line["result"] for line in self.lines if "result" in line}

    def losses(self, part: Part) -> int:
        """How often the device was lost during a part."""
        return sum(line["part"] == part.name for line in self.lines if "lost" in line)

    def failures(self) -> dict[str, str]:
        """Errors of unfinished parts by name; a part that started and has no end has ended its process."""
        found: dict[str, str] = {}
        for line in self.lines:
            if "part" in line:
                found[line["part"]] = line.get("error", "the process ended during it")
        return {name: error for name, error in found.items() if name not in self.finished()}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a result file; half a last line, of a process that was killed, is left out. Errors: ValueError."""
    lines = path.read_text().splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    try:
        return [json.loads(line) for line in lines]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no result file ({error}); give one of a stage") from error


def run_parts(file: ResultFile, parts: Sequence[Part], minutes: float, part_seconds: float) -> bool:
    """Run what is not finished, what failed before last, until the minutes are over; True if no part is left.

    A part has LIMIT_SHARE times its share of what is left, but at least `part_seconds`. What prepares parts runs before
    the first of them, and again after parts that need something else. After an error that CUDA does not recover from,
    such as an illegal address, the process begins anew.
    """
    started, failed, prepared = time.monotonic(), file.failures(), None
    measured = [part for part in parts if part.prepares is None]
    parts = [part for part in parts if file.losses(part) < MAX_LOSSES]
    queue = [part for part in parts if part.prepares is None and part.name not in file.finished()]
    queue.sort(key=lambda part: part.name in failed)
    while queue:
        needs = [
            part for part in parts if part.prepares is not None and part.prepares.items() <= queue[0].facts.items()
        ]
        now = needs if needs != prepared else [queue.pop(0)]
        prepared = needs
        for number, part in enumerate(now):
            left = 60 * minutes - (time.monotonic() - started)
            if left > 1:
                share = left / (len(queue) + len(now) - number)
                run_part(file, part, min(left, max(part_seconds, part.least_seconds, LIMIT_SHARE * share)))
                if "lost" in file.lines[-1] and (queue or part is not now[-1]):
                    restart(minutes - (time.monotonic() - started) / 60)
            else:
                queue = []
    missing = [part.name for part in measured if part.name not in file.finished()]
    print(f"{len(measured) - len(missing)} of {len(measured)} parts are finished in {file.path}", flush=True)
    if missing:
        print("The same command goes on with the others.")
    return not missing


def run_part(file: ResultFile, part: Part, limit: float) -> None:
    """Run one part and write its result or its error; Ctrl-C ends the stage."""
    file.append({"part": part.name, "start": time.time()})
    started = time.monotonic()
    end: dict[str, Any] = {}
    try:
        with time_limit(limit):
            end = {"result": part.facts | part.run()}
    except KeyboardInterrupt:
        file.append({"part": part.name, "error": "interrupted"})
        raise
    except (Exception, SystemExit, Overran) as error:  # the other parts are worth having
        traceback.print_exc()
        end = {"error": f"{type(error).__name__}: {error}"[:500]} | ({} if device_answers() else {"lost": True})
    seconds = round(time.monotonic() - started, 3)
    file.append({"part": part.name, "seconds": seconds, **end})
    found = end["result"] if "result" in end else {"error": end["error"]}
    shown = [
        f"{name} {value}"
        for name, value in found.items()
        if name not in part.facts and not isinstance(value, list | dict)
    ]
    print(f"{seconds:7.1f} s  {part.name}: {', '.join(shown)}", flush=True)


def device_answers() -> bool:
    """False after an error that every later call of CUDA in this process returns, too."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
    return True


def restart(minutes: float) -> None:
    """Begin this process anew, with so many minutes."""
    print("The device is lost to this process, which begins anew.", flush=True)
    command = [sys.executable, *sys.argv, "--minutes", str(minutes)]
    os.closerange(3, 1 << 16)  # so that the driver frees what the process has
    os.execv(sys.executable, command)
