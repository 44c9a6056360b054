"""The command line application and its commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import saltus
from saltus.cli import options
from saltus.cli.bench import bench
from saltus.cli.chat import chat
from saltus.cli.check import check
from saltus.cli.collect import collect
from saltus.cli.collect_data import data as collect_data
from saltus.cli.collect_states import states as collect_states
from saltus.cli.demo import demo
from saltus.cli.errors import one_line_errors
from saltus.cli.export import export
from saltus.cli.generate import generate
from saltus.cli.infill import infill
from saltus.cli.lm_eval import PASS_THROUGH_SETTINGS, lm_eval
from saltus.cli.methods import methods
from saltus.cli.pull import pull
from saltus.cli.serve import serve
from saltus.cli.train import train
from saltus.cli.tune import tune


class Commands(TyperGroup):
    """A group of commands whose failures are one line each."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **settings: Any) -> Any:
        given = list(sys.argv[1:] if args is None else args) or ["--help"]
        options.show_no_type_of_flags(self)
        with one_line_errors():
            code = super().main(given, *rest, **{**settings, "standalone_mode": False})
            sys.stdout.flush()
            sys.exit(code or 0)

    def invoke(self, ctx: Any) -> Any:
        with one_line_errors():  # before typer handles Ctrl-C and broken pipes itself
            return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool | None) -> None:
    if wanted:
        print(f"saltus {saltus.__version__}")
        raise typer.Exit


@app.callback(
    epilog="Begin with [bold]saltus demo[/bold]. "
    "[bold]saltus COMMAND --help[/bold] shows the options of a command, with examples."
)
def root_command(
    version: Annotated[
        bool | None,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave."),
    ] = None,
) -> None:
    """Speculative decoding that does not change the text: several tokens per call of a language model."""


GENERATE_PANEL, COMPARE_PANEL, TRAIN_PANEL, MODELS_PANEL = "Generate", "Compare", "Train", "Models and methods"
app.command(rich_help_panel=GENERATE_PANEL)(generate)
app.command(rich_help_panel=GENERATE_PANEL)(chat)
app.command(rich_help_panel=GENERATE_PANEL)(infill)
app.command(rich_help_panel=GENERATE_PANEL)(serve)
app.command(rich_help_panel=GENERATE_PANEL)(demo)
app.command(rich_help_panel=COMPARE_PANEL)(check)
app.add_typer(bench, name="bench", rich_help_panel=COMPARE_PANEL)
app.command(rich_help_panel=COMPARE_PANEL, context_settings=PASS_THROUGH_SETTINGS, no_args_is_help=True)(lm_eval)
collect.command("data")(collect_data)
collect.command("states")(collect_states)
app.add_typer(collect, name="collect", rich_help_panel=TRAIN_PANEL)
app.add_typer(train, name="train", rich_help_panel=TRAIN_PANEL)
app.command(rich_help_panel=TRAIN_PANEL)(export)
app.command(rich_help_panel=COMPARE_PANEL)(tune)
app.command(rich_help_panel=MODELS_PANEL)(pull)
app.command(rich_help_panel=MODELS_PANEL)(methods)
