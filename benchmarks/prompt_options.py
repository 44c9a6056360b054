"""Read the options that say which prompts a benchmark answers; of prompts with several turns the first counts."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from saltus.engine.prompts import read_prompts_file

System = TypeVar("System")


def in_turn(systems: Iterable[System], number: int) -> list[System]:
    """The systems, of which another one is first each time: what comes after another may find warmer memory."""
    order = list(systems)
    first = number % len(order)
    return order[first:] + order[:first]


def add_prompt_options(parser: argparse.ArgumentParser, required: bool = True) -> None:
    parser.add_argument(
        "--prompts", type=Path, required=required, help='JSON lines with "prompt", "messages" or "turns"'
    )
    parser.add_argument("--every", type=int, default=1, help="take every n-th prompt")
    parser.add_argument("--model", default="smollm2-135m")


def first_turns(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Any]:
    """The chosen prompts, as `Engine.generate` takes them. A wrong option ends the program in one line."""
    if options.every < 1:
        parser.error(f"--every is {options.every}, but must be 1 or more")
    try:
        found = read_prompts_file(options.prompts)[:: options.every]
    except ValueError as error:
        parser.error(str(error))
    return [prompt.turns[0] if prompt.turns else list(prompt.messages) for prompt in found]
