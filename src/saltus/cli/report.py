"""Statistics of an answer: the line below it, the comparison with plain decoding, the JSON record; files of results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

FINISH_WORDS = {"stop": "finished", "length": "cut at the length limit", None: "interrupted"}


def record(prompt: Any, generation: Any, method: str) -> dict[str, Any]:
    """The record that `--json` prints for a prompt."""
    counted = generation.statistics
    return {
        "prompt": prompt, "text": generation.text, "tokens": generation.tokens,
        "finish_reason": generation.finish_reason, "method": method, "calls": counted.calls,
        "tokens_per_call": counted.tokens_per_call, "seconds": counted.seconds,
        "tokens_per_second": counted.tokens_per_second, "prefill_seconds": counted.prefill_seconds,
        "tokens_by_call": counted.tokens_by_call,
    }  # fmt: skip


def print_json(value: Any) -> None:
    """Print an object as one line."""
    utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(value, ensure_ascii=not utf8), flush=True)


def write_result(
    file: Path, result: Mapping[str, Any], write_figures: Callable[[Mapping[str, Any], Path], Sequence[Path]]
) -> None:
    """Write a result as JSON, and then its figures into the same folder; without matplotlib a note says so."""
    from saltus.cli.answers import print_note

    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    try:
        paths = write_figures(result, file.parent)
    except ModuleNotFoundError:
        print_note(f'written: {file}; for figures: pip install ".[bench]" in the clone')
    else:
        print_note(f"written: {file}" + "".join(f", {path.name}" for path in paths if path.suffix == ".png"))


def statistics_line(generation: Any, method: str) -> str:
    """The statistics line below an answer."""
    return f"{generation.statistics} · {method} · {FINISH_WORDS[generation.finish_reason]}"


def comparison_line(generation: Any, plain: Any, method: str, repeats: Sequence[tuple[Any, Any]] = ()) -> str:
    """This run, plain decoding in the same run, and whether the text is the same; speeds are medians with `repeats`."""
    ours, theirs = generation.statistics, plain.statistics
    from saltus.engine.comparison import first_difference

    same = first_difference(generation.tokens, plain.tokens)
    verdict = "same text, token for token" if same is None else f"the text differs from token {same} on"
    pairs = [(generation, plain), *repeats]
    speed, plain_speed = (median(run.statistics.tokens_per_second for run in runs) for runs in zip(*pairs, strict=True))
    ratio = speed / plain_speed if plain_speed else float("nan")
    how = f", medians of {len(pairs)} runs in turns" if repeats else ""
    return (
        f"{method}: {number_of(ours.tokens, 'token')} in {number_of(ours.calls, 'call')},"
        f" {ours.tokens_per_call:.2f} a call, {speed:.1f} tokens/s;"
        f" plain in this run: {number_of(theirs.calls, 'call')}, {plain_speed:.1f} tokens/s (×{ratio:.2f}{how});"
        f" {verdict}"
    )


def number_of(number: int, noun: str) -> str:
    """A count and its noun, in the plural where there is not one."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
