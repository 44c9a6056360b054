"""Turn every failure into one line with the cure; SALTUS_DEBUG=1 shows the traceback."""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from saltus.core.out_of_memory import is_out_of_memory

BAD_INPUT, INTERNAL_ERROR = 2, 70
INTERRUPTED, BROKEN_PIPE = 130, 141  # as a shell reports SIGINT and SIGPIPE


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn exceptions into a line on stderr and an exit code."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        raise SystemExit(_print_error(str(stopped) or "interrupted", INTERRUPTED)) from None
    except Exception as error:
        if type(error).__name__ in ("Exit", "Abort"):  # typer's own exits
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # the help has been printed
            raise SystemExit(0) from None
        if isinstance(error, OSError) and error.errno == errno.EPIPE:  # the reader of our output has left
            _silence_stdout()
            raise SystemExit(BROKEN_PIPE) from None
        if os.environ.get("SALTUS_DEBUG"):
            traceback.print_exc()
        raise SystemExit(_print_error(*describe_error(error))) from error


def describe_error(error: Exception) -> tuple[str, int]:
    """The line and the exit code for an error."""
    message = " ".join(str(error).split())
    if complaint := getattr(error, "format_message", None):  # a wrong command line
        message = " ".join(complaint().split()).rstrip(".")
        context = getattr(error, "ctx", None)
        return f"{message}; see `{context.command_path} --help`" if context else message, BAD_INPUT
    if is_out_of_memory(error):
        return "out of memory; take a smaller model, --dtype bfloat16, or fewer --max-new-tokens", BAD_INPUT
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        which = f"of {error.filename}" if error.filename else "that the output goes to"
        return f"the disk {which} is full; free some space", BAD_INPUT
    if isinstance(error, OSError):
        what = error.strerror or message or type(error).__name__
        return f"{error.filename}: {what}" if error.filename else what, BAD_INPUT
    if isinstance(error, ModuleNotFoundError):
        return f"{message}; install it with pip, or install saltus anew", BAD_INPUT
    if isinstance(error, ValueError):
        return message or type(error).__name__, BAD_INPUT
    kind, faulty = type(error).__name__, " or ".join(["saltus", *_packages_of_methods()])
    return (
        f"{kind}{': ' if message else ''}{message[:300]} (a fault of {faulty}; SALTUS_DEBUG=1 shows where it happened)",
        INTERNAL_ERROR,
    )


def _packages_of_methods() -> list[str]:
    """Other packages whose methods may have been in use."""
    methods = sys.modules.get("saltus.methods")
    found = {each.__module__.partition(".")[0] for each in methods.available_methods().values()} if methods else set()
    return sorted(found - {"saltus"})


def prepare_streams() -> None:
    """Replace characters that a terminal cannot show, and closed streams (`2>&-`) by the null device."""
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
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
    """Discard what Python would still flush at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
