"""Check and measure the CUDA path in stages of under eight minutes each.

    python benchmarks/gpu visit --out DIR --minutes 6        # all of these, one after another: visit --help
    python benchmarks/gpu agreement --out agreement.jsonl    # does the device write what the CPU would?
    python benchmarks/gpu exactness --out exactness.jsonl    # do rows and texts differ from plain decoding alone?
    python benchmarks/gpu calls --out calls.jsonl            # what does a call cost, against the roofline?
    python benchmarks/gpu speed --out speed.jsonl            # tokens a second, beside Transformers' generate
    python benchmarks/gpu server --out server.jsonl          # the server with 1, 8 and 32 clients
    python benchmarks/gpu table *.jsonl                      # the tables of docs/results/gpu.md

A stage consists of parts of some seconds. Each has a time limit, and its result is written as a line of --out at once.
A part that fails or takes too long is written with its error, and the next one follows, in a new process after an error
that CUDA does not recover from; a part with two of these is left out. The same command goes on where a stage ended, was
killed or ran out of minutes: finished parts are skipped, those that failed come last. A stage exits with 1 if something
differs, failed or is left. Without a GPU, `--rehearse --device cpu` runs a stage at tiny sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

from random_models import SHAPE_NAMES, SHAPES

from gpu import agreement_stage, call_stage, exact_stage, server_stage, speed_stage
from gpu.part_results import ResultFile, read_lines, run_parts
from gpu.table_lines import where_it_ran
from saltus.evaluation.reports.environment import git_commit, machine_info

STAGES: dict[str, ModuleType] = {
    "agreement": agreement_stage, "exactness": exact_stage, "calls": call_stage, "speed": speed_stage,
    "server": server_stage,
}  # fmt: skip
# Options that choose parts, so that a file may be continued with others; the kinds of what stands between commas.
SELECTING = {
    "models": str, "shapes": str, "methods": str, "baselines": str, "dtypes": str, "batches": int, "rows": int,
    "contexts": int, "clients": int, "temperatures": float, "samplings": str, "take": None,
}  # fmt: skip
OF_A_RUN = ("stage", "out", "minutes", "part_seconds", "rehearse", "until_end", "device")


def main(started: float) -> None:
    """Run the stage of the command line; `started`: when the process did, by time.monotonic."""
    parser = make_parser()
    args = parser.parse_args()
    if args.stage == "table":
        sys.exit(print_tables(parser, args.files))
    stage = STAGES[args.stage]
    if args.rehearse:
        parser = make_parser(rehearsed=args.stage)
        args = parser.parse_args()
    try:
        split_lists(args)
    except ValueError as error:
        parser.error(str(error))
    settings = {name: value for name, value in vars(args).items() if name not in (*SELECTING, *OF_A_RUN)}
    facts = {
        "command": shlex.join(["python", "benchmarks/gpu", *sys.argv[1:]]), "commit": git_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine_info(),
    }  # fmt: skip
    if args.prompts is not None:
        settings["prompts"] = str(args.prompts)
    try:
        file = ResultFile(args.out)
        file.begin(args.stage, settings, facts)
    except ValueError as error:
        parser.error(str(error))
    with contextlib.ExitStack() as args.until_end:
        minutes = args.minutes - (time.monotonic() - started) / 60
        complete = run_parts(file, stage.parts(args), minutes, args.part_seconds)
    print("\n".join(["", *lines_of(args.out)]))
    results, failures = file.finished(), file.failures()
    wrong = sum(bool(result.get("different")) for result in results.values())
    left = "" if complete else ", others are left"
    print(f"\n{args.stage}: {len(results)} parts finished{left}, {len(failures)} failed, {wrong} found differences")
    sys.exit(bool(wrong or not complete or failures))


def make_parser(rehearsed: str | None = None) -> argparse.ArgumentParser:
    """The parser of all stages; the defaults of a rehearsed one are its tiny sizes."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="stage", metavar="STAGE", required=True)
    for name, stage in STAGES.items():
        told = (stage.__doc__ or "").strip()
        options = commands.add_parser(
            name, help=told.partition("\n")[0], description=told, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        stage.add_options(options)
        add_shared_options(options, name)
        if name == rehearsed:
            options.set_defaults(**stage.REHEARSAL)
    commands.add_parser("visit", help="Run all stages in one command: visit --help.")  # see __main__.py
    tables = commands.add_parser("table", help="Print the tables of result files.")
    tables.add_argument("files", type=Path, nargs="+", metavar="FILE")
    return parser


def add_shared_options(options: argparse.ArgumentParser, stage: str) -> None:
    """What all stages take; `models` and `methods` where the stage has them."""
    models, methods = options.get_default("models"), options.get_default("methods")
    if models is not None:
        shapes = (
            f"models, and shapes with random weights ({SHAPE_NAMES}); MODEL@FORMAT: with --weights FORMAT (file for a"
            " checkpoint in 8-bit floats), SHAPE@fp8: in 8-bit floats"
        )
        options.add_argument("--models", default=models, help=shapes)
    if methods is not None:
        options.add_argument("--methods", default=methods, help="methods, by commas as all lists")
        options.add_argument("--option", action="append", default=[], metavar="METHOD.FIELD=VALUE", help="of a method")
    options.add_argument("--prompts", type=Path, help='JSON lines with "prompt", "messages" or "turns"')
    options.add_argument("--device", default="cuda")
    options.add_argument("--out", type=Path, default=Path(f"gpu-{stage}.jsonl"), help="JSON lines; may exist")
    options.add_argument("--minutes", type=float, default=7.5, help="of the whole stage")
    options.add_argument("--part-seconds", type=float, default=60.0, help="that each part may take, if they are left")
    options.add_argument("--rehearse", action="store_true", help="with tiny sizes, to see whether a stage runs")


def split_lists(args: argparse.Namespace) -> None:
    """Turn what stands between commas into lists. Errors: ValueError of one line."""
    for name, kind in SELECTING.items():
        given = getattr(args, name, None)
        if kind is not None and isinstance(given, str):
            try:
                setattr(args, name, [kind(each) for each in given.split(",") if each])
            except ValueError:
                raise ValueError(f"--{name} is {given!r}, but must be numbers between commas, such as 1,8") from None
    if unknown := [name for name in getattr(args, "samplings", ()) if name not in agreement_stage.SAMPLINGS]:
        raise ValueError(f"--samplings has {unknown[0]!r}; there are {', '.join(agreement_stage.SAMPLINGS)}")
    if unknown := [shape for shape in getattr(args, "shapes", ()) if shape not in (*SHAPES, speed_stage.OWN_SHAPE)]:
        raise ValueError(f"--shapes has {unknown[0]!r}; there are {speed_stage.OWN_SHAPE}, {', '.join(SHAPES)}")


def print_tables(parser: argparse.ArgumentParser, files: list[Path]) -> int:
    for file in files:
        try:
            print("\n".join([*lines_of(file), ""]))
        except (OSError, ValueError) as error:
            parser.error(str(error))
    return 0


def lines_of(path: Path) -> list[str]:
    """The tables of a result file, and what failed. Errors: OSError, ValueError."""
    lines = read_lines(path)
    if not any("run" in line for line in lines):
        raise ValueError(f"{path} has no line of a run; give a file of a stage")
    file, stage = ResultFile(path), next(line["run"]["stage"] for line in lines if "run" in line)
    found = [f"## {stage}", "", *where_it_ran(lines), "", *STAGES[stage].tables(list(file.finished().values()))]
    failed = [f"- FAILED {name}: {error}" for name, error in file.failures().items()]
    return [*found, *(["", *failed] if failed else [])]
