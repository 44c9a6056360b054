"""Print answers while they are decoded, and decode the plain baseline for comparisons."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from saltus.cli.coloured_text import ColouredTextWriter, terminal


def stream_answer(engine: Any, prompt: Any, painter: ColouredTextWriter, settings: Mapping[str, Any]) -> Any:
    """Print an answer while it is decoded, and return its Generation."""
    written = engine.stream(prompt, **settings)
    try:
        for chunk in written:
            painter.write(chunk.text, chunk.call_index, len(chunk.tokens))
    finally:
        painter.finish_line()
    return written.generation


def run_again(engine: Any, prompt: Any, settings: Mapping[str, Any], method: str = "plain") -> Any:
    """Decode the same by a method without printing; a terminal shows the number of tokens."""
    engine.decoder.prefix_tree.clear()  # it reads the prompt, too
    written, count, live = engine.stream(prompt, **{**settings, "method": method}), 0, sys.stderr.isatty()
    name = "plain decoding" if method == "plain" else method
    try:
        for chunk in written:
            count += len(chunk.tokens)
            if live:
                print(f"\r\x1b[2mthe same with {name}: {count} tokens\x1b[0m", end="", file=sys.stderr)
                sys.stderr.flush()
    finally:
        if live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return written.generation


def print_note(line: str) -> None:
    """Print a line on stderr, dim on a terminal."""
    sys.stdout.flush()
    terminal(stderr=True).print(Text(line, "dim"))
