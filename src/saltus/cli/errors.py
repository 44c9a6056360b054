"""End every failure in one line, who, what, cure; a traceback only where SALTUS_DEBUG asks for it."""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

BAD_INPUT, INTERNAL_ERROR, INTERRUPTED, BROKEN_PIPE = (
    2,
    70,
    130,
    141,
)  # 141: what a shell shows for a tool that SIGPIPE ended


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn what is raised inside into a line on stderr and the exit code of its kind."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        raise SystemExit(_print_error(str(stopped) or "interrupted", INTERRUPTED)) from None
    except Exception as error:
        if type(error).__name__ in ("Exit", "Abort"):  # typer's own ways to end
            raise
        if isinstance(error, OSError) and error.errno == errno.EPIPE:  # whoever read our output has left
            _silence_stdout()
            raise SystemExit(BROKEN_PIPE) from None
        if os.environ.get("SALTUS_DEBUG"):
            traceback.print_exc()
        raise SystemExit(_print_error(*describe_error(error))) from error


def describe_error(error: Exception) -> tuple[str, int]:
    """The line and the exit code for an error."""
    said = " ".join(str(error).split())
    if complaint := getattr(error, "format_message", None):  # of typer: a wrong command line
        said = " ".join(complaint().split()).rstrip(".")
        context = getattr(error, "ctx", None)
        return f"{said}; see `{context.command_path} --help`" if context else said, BAD_INPUT
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out of memory; take a smaller model, --dtype bfloat16, or fewer --max-new-tokens", BAD_INPUT
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{error.filename or 'the disk that the output goes to'} is full; free some space", BAD_INPUT
    if isinstance(error, OSError):
        what = error.strerror or said or type(error).__name__
        return f"{error.filename}: {what}" if error.filename else what, BAD_INPUT
    if isinstance(error, ModuleNotFoundError):
        return f"{said}; install it with pip, or install saltus anew", BAD_INPUT
    if isinstance(error, ValueError):
        return said or type(error).__name__, BAD_INPUT
    kind = type(error).__name__
    return (
        f"{kind}{': ' if said else ''}{said[:300]} (a fault of saltus; SALTUS_DEBUG=1 shows where it happened)",
        INTERNAL_ERROR,
    )


def replace_unprintable_characters() -> None:
    """Let a terminal that lacks a character show another one, and not end the text."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _print_error(line: str, code: int) -> int:
    try:
        sys.stdout.flush()
    except OSError:
        _silence_stdout()
    with suppress(OSError):
        print(f"saltus: {line}", file=sys.stderr, flush=True)
    return code


def _silence_stdout() -> None:
    """What Python would still flush at exit goes nowhere."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
