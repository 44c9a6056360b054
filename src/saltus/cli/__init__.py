"""Run the command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import gc
import os

ALLOCATIONS = 50_000  # between collections of garbage: imports and a model make 200 thousand objects, which stay


def main() -> None:
    """Run `saltus` with the arguments of the process; every failure ends in one line and an exit code."""
    from saltus.cli.errors import one_line_errors, prepare_streams

    if "RANK" in os.environ:  # one of several processes of a training run: without torch's hints on its own settings
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if os.environ.get("COLUMNS") == "0":  # as some terminals say; rich would write lines of no width
        del os.environ["COLUMNS"]
    prepare_streams()
    gc.set_threshold(ALLOCATIONS)
    with one_line_errors():
        from saltus.cli.app import app

        app(prog_name="saltus")
