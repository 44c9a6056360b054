"""Run the command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations


def main() -> None:
    """Run `saltus` with the arguments of the process; every failure ends in one line and an exit code."""
    from saltus.cli.errors import one_line_errors, replace_unprintable_characters

    replace_unprintable_characters()
    with one_line_errors():
        from saltus.cli.app import app

        app(prog_name="saltus")
