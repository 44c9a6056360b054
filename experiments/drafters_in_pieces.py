"""Text, training and check of drafters of two sizes, in pieces of a few minutes: for machines that are lent briefly.

    python experiments/drafters_in_pieces.py --prompts FILE --check held_out.jsonl --work runs/drafters --minutes 9

Each stage is a command of saltus that continues after an interruption. The program runs them in turn, stops the one
that is running when its minutes are over, and says what is left. Give the same command again until it is done. Copy the
work folder to keep what was made. `--device cuda` makes all stages use a GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from saltus.core.picking import Coupling

SIZES = {
    "small": [],
    "large": ["--set", "layers=4", "--set", "intermediate=1536", "--set", "vocabulary=16384"],
}
SECONDS_TO_STOP = 20.0  # for the command that is running to end by itself


def stages(options: argparse.Namespace) -> Iterator[tuple[str, Path, list[str]]]:
    """Names, what each stage leaves when it is complete, and commands."""
    work, model = options.work, ["--model", options.model, "--device", options.device]
    text, coupling = work / "text", [] if options.coupling is None else ["--coupling", options.coupling]
    command = ["collect", "text", "--prompts", str(options.prompts), "--out", str(text), *model, *coupling]
    yield "text", work / "text.done", [*command, "--batch-size", str(options.batch_size), "-n", str(options.tokens)]
    for size, settings in SIZES.items():
        folder = work / size
        steps = [] if options.steps is None else ["--set", f"steps={options.steps}"]
        steps += [] if options.coupling is None else ["--set", f"coupling={options.coupling}"]
        command = ["train", "ptp", "--recipe", "smollm2", "--teacher", str(text), "--work", str(folder), *model]
        yield f"training, {size}", folder / "done", [*command, *settings, *steps, "--out", str(folder / "drafter")]
    for size in SIZES:
        folder = work / size
        command = ["bench", "--methods", "plain,lookup,ptp,ptp+lookup", "--suite", f"prompts:{options.check}", *model]
        command += coupling
        option = ["--option", f"ptp.model={folder / 'drafter'}"]
        yield f"check, {size}", folder / "checked", [*command, *option, "--out", str(folder / "bench")]


def run_until(command: list[str], deadline: float) -> bool:
    """Run a command of saltus; False if its time was over first. Errors: SystemExit if it fails."""
    process = subprocess.Popen([str(Path(sys.executable).with_name("saltus")), *command])
    try:
        status = process.wait(max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            process.kill()
        return False
    if status:
        sys.exit(status)
    return True


def main() -> None:
    """Run the stages that are not complete, until the minutes are over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines, as for saltus collect text")
    parser.add_argument("--check", type=Path, required=True, help="prompts that were kept apart, JSON lines")
    parser.add_argument("--work", type=Path, required=True, help="folder of everything that is made")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch-size", type=int, default=64, help="texts written together")
    parser.add_argument("--tokens", type=int, default=160, help="of an answer, at most")
    parser.add_argument(
        "--coupling", choices=get_args(Coupling), help="of text, training and check; default: each command's own"
    )
    parser.add_argument("--steps", type=int, help="of each training, in place of the recipe's")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes - SECONDS_TO_STOP
    options.work.mkdir(parents=True, exist_ok=True)
    for name, mark, command in stages(options):
        if mark.exists():
            continue
        print(f"{name}: saltus {' '.join(command)}", flush=True)
        if not run_until(command, deadline):
            print(f"{name} is not complete; give the same command again", flush=True)
            return
        mark.touch()
    print("all stages are complete", flush=True)


if __name__ == "__main__":
    main()
