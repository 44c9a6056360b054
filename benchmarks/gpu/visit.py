"""Run all checks and measurements on a machine that is lent for minutes, one after another, whatever fails.

Each part is a process of its own with a share of the minutes; what one leaves, the others have. A part that fails,
crashes or hangs never stops the next one. The output of all goes to DIR/visit.log, results to DIR/*.jsonl as they are
measured, and the summary to DIR/visit.json after each part. The same command goes on with what is not finished. Exits
with 1 if a part failed. Nothing is imported here that may be missing on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GPU_TESTS = ("tests/models", "tests/core/test_sampling.py", "tests/evaluation/test_bench_step.py")
ENDING = 8  # seconds for a stage to end by itself, and at most a third of its time
SHOWN_LINES, SHOWN_WIDTH = 12, 200  # of a part's output, as it ends; the log has all
MODEL_PARTS = ("smoke", "agreement", "exactness", "speed")  # that need the model


@dataclass(frozen=True)
class VisitPart:
    """A process, its share of what is left, and what to read of it."""

    name: str
    share: float
    command: tuple[str, ...]
    read: str
    is_stage: bool = False  # of benchmarks/gpu: --minutes lets it end by itself


def main() -> None:
    args = make_parser().parse_args(sys.argv[2:])
    args.out = args.out.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # whose part is ended, too
    parts = [part for part in parts_of_visit(args) if args.parts is None or part.name in args.parts.split(",")]
    sys.exit(run_visit(parts, args.out, args.minutes))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/gpu visit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-visit"), metavar="DIR", help="default: gpu-visit")
    parser.add_argument("--minutes", type=float, default=6.0, help="of the whole visit; default: 6")
    parser.add_argument("--model", default="smollm2-135m", help="default: smollm2-135m")
    parser.add_argument(
        "--shapes", default="7B", help="with random weights, of calls, rows and speed, by commas; default: 7B"
    )
    parser.add_argument("--no-model", action="store_true", help="only what needs no weights of --model")
    parser.add_argument("--parts", help="some of them, by commas; default: all")
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--rehearse", action="store_true", help="with tiny sizes, to see whether the parts run")
    return parser


def parts_of_visit(args: argparse.Namespace) -> list[VisitPart]:
    """All parts in their order, the most telling ones first, with time for the kernels to be compiled."""
    models = args.shapes if args.no_model else f"{args.model},{args.shapes}"
    found = [
        VisitPart("environment", 2, (sys.executable, str(ROOT / "benchmarks/gpu/environment.py")), "visit.log"),
        stage(
            args, "smoke", 3, "agreement", "the text makes sense, and no token is beyond the tolerance",
            models=args.model, methods="plain", samplings="greedy", take=1, tokens=32,
        ),
        VisitPart("tests", 2, tests_command(), "visit.log: the failures that pytest lists"),
        stage(
            args, "agreement", 2, "agreement", "no token is beyond the tolerance; tokens a call as on the CPU",
            models=args.model, samplings="greedy,truncated,sampled", take=4,
        ),
        stage(
            args, "exactness", 2, "exactness", "no row and no text differs", models=args.model, dtypes="bfloat16",
            batches="1,7", temperatures="0,0.7", methods="lookup,ptp+lookup", tokens=48,
        ),
        stage(
            args, "calls", 2.5, "calls", "milliseconds of a call, and times the roofline", models=models, rows="1,8,32",
            contexts="200,3000", batches=16,
        ),
        stage(
            args, "speed", 3, "speed", "tokens a second, times plain", model=args.model, baselines="generate",
            shapes=f"default,{args.shapes}", methods="plain,lookup,ptp+lookup,auto", take=4,
        ),
        stage(
            args, "more-exactness", 3, "exactness", "no row and no text differs", models=models, batches="1,2,7,32",
            tokens=48,
        ),
    ]  # fmt: skip
    return [part for part in found if not (args.no_model and part.name in MODEL_PARTS)]


def stage(args: argparse.Namespace, name: str, share: float, command: str, read: str, **options: Any) -> VisitPart:
    """A stage of benchmarks/gpu with these options; rehearsed with its own tiny ones."""
    file = args.out / f"{name.removeprefix('more-')}.jsonl"
    words = [command, "--out", str(file), "--device", args.device]
    if args.rehearse:
        words.append("--rehearse")
    else:
        words += [word for option, value in options.items() for word in (f"--{option}", str(value))]
    return VisitPart(
        name, share, (sys.executable, str(ROOT / "benchmarks/gpu"), *words), f"{file.name}: {read}", is_stage=True
    )


def tests_command() -> tuple[str, ...]:
    """The tests for GPUs; without the types that the project's options check, for which packages may be missing."""
    tests = [str(ROOT / test) for test in GPU_TESTS]
    return (
        sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "--maxfail=20", "-m", "gpu",
        "--continue-on-collection-errors", *tests,
    )  # fmt: skip


def run_visit(parts: Sequence[VisitPart], out: Path, minutes: float) -> int:
    """Run the parts, each for its share of what is left, and print a summary; 1 if one failed, else 0."""
    out.mkdir(parents=True, exist_ok=True)
    started, ended = time.monotonic(), list[dict[str, Any]]()
    with (out / "visit.log").open("ab") as log:
        for number, part in enumerate(parts):
            left = 60 * minutes - (time.monotonic() - started)
            limit = left * part.share / sum(each.share for each in parts[number:])
            ended.append(run_part(part, limit, log) if limit > 1 else _facts(part, "no time was left"))
            (out / "visit.json").write_text(json.dumps({"minutes": minutes, "parts": ended}, indent=1))
    print(f"\nThe visit took {time.monotonic() - started:.0f} s of {60 * minutes:.0f}; all output is in {out}:")
    for facts in ended:
        print(f"  {facts['name']:14} {facts['seconds']:6.1f} s  {facts['ended']}: {facts['said']}")
        print(f"  {'':14} read {facts['read']}")
    print(f"Tables: python benchmarks/gpu table {out}/*.jsonl", flush=True)
    return int(any(facts["ended"] != "well" for facts in ended))


def run_part(part: VisitPart, limit: float, log: Any) -> dict[str, Any]:
    """Run a part for `limit` seconds at most, its output going to the log, whose last lines are printed."""
    own = max(limit - ENDING, limit * 2 / 3)  # after which a stage ends by itself
    command = [*part.command, *(["--minutes", f"{own / 60:.3f}"] if part.is_stage else [])]
    title = f"=== {part.name}, at most {limit:.0f} s: {' '.join(command)}"
    print(title, flush=True)
    log.write(f"{title}\n".encode())
    log.flush()
    begin, started = log.tell(), time.monotonic()
    try:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment(), cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit)
            found = "well" if code == 0 else f"exit code {code}" if code > 0 else signal.Signals(-code).name
        except subprocess.TimeoutExpired:
            found = "took too long"
        finally:
            end_group(process)
    except OSError as error:
        found = f"did not start: {error}"
    log.seek(0, os.SEEK_END)
    lines = _last_lines(Path(log.name), begin)
    print("\n".join(lines), flush=True)
    return _facts(part, found, time.monotonic() - started, lines[-1] if lines else "")


def _facts(part: VisitPart, ended: str, seconds: float = 0.0, said: str = "") -> dict[str, Any]:
    return {"name": part.name, "ended": ended, "seconds": round(seconds, 1), "said": said, "read": part.read}


def _last_lines(path: Path, begin: int) -> list[str]:
    with path.open("rb") as file:
        file.seek(begin)
        lines = file.read().decode(errors="replace").splitlines()
    return [line[:SHOWN_WIDTH] for line in lines if line.strip()][-SHOWN_LINES:]


def environment() -> dict[str, str]:
    """That of this process, with the package in the path and without a search for models on a network."""
    given = [str(Path(each).resolve()) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    path = os.pathsep.join([str(ROOT / "src"), *given])
    chosen = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    return {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ, **chosen}


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started: first as Ctrl-C does, so that results are written, then at once."""
    for number, seconds in ((signal.SIGINT, 3.0), (signal.SIGKILL, 3.0)):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what it left
