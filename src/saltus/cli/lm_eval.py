"""The lm-eval command: lm-evaluation-harness with the model `saltus` as default."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

COMMANDS = ("run", "ls", "validate")
PASS_THROUGH_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def lm_eval(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENT", help="What lm_eval is given: options, or a command.")
    ] = None,
) -> None:
    r"""Score a model with lm-evaluation-harness, decoding with any method.

    [dim]All arguments are passed to lm_eval.[/dim]

    [bold]Examples[/bold]

        saltus lm-eval --tasks gsm8k --limit 20

        saltus lm-eval --tasks ifeval --model_args method=jacobi+lookup,seed=1

        saltus lm-eval --tasks hellaswag --batch_size 8 --output_path results

        saltus lm-eval --tasks gsm8k --model_args pretrained=FOLDER --chat-template vicuna

        saltus lm-eval ls tasks

        saltus lm-eval run --help

    The last two show the tasks, and [bold]all options of lm_eval[/bold].

    [bold]--model_args[/bold] takes pretrained (a short name, a hub id, a folder, a GGUF
    file), method, dtype, weights, arithmetic, device, seed, coupling, rule,
    max_draft_tokens, options of methods like lookup.max_ngram_size=5, and of
    lm_eval's own max_length, max_gen_toks and add_bos_token.

    [bold]--chat-template[/bold] NAME or FILE is for a model without a template of its own;
    lm_eval then applies it ([bold]--apply_chat_template[/bold]).

    [bold]Scores[/bold] are those of [bold]--model hf[/bold], up to rounding. Generated
    text is decoded by the method; given answers are scored by the model alone,
    all answers to a question in one call where they fit.

    It needs an extra: [bold]pip install ".\[lm-eval]" in the clone[/bold].
    """
    from saltus.evaluation.benchmarks.lm_eval_model import model_class

    model_class()
    _run(complete_arguments(arguments or ()))


def complete_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments, completed by the command `run` and the model, and with --chat-template in lm_eval's words."""
    given, template = _without_chat_template(arguments)
    if "-m" in given:
        name = "".join(given[given.index("-m") + 1 :][:1]) or "NAME"
        raise ValueError(f"lm_eval has no option -m; name the model by --model_args pretrained={name}")
    if not given or given[0] not in (*COMMANDS, "-h", "--help"):
        given.insert(0, "run")
    names_one = any(word in ("--model", "-M") or word.startswith("--model=") for word in given)
    if given[0] == "run" and len(given) > 1 and not names_one:
        given[1:1] = ["--model", "saltus"]
    if template is None:
        return given
    if names_one and not any(word in ("saltus", "--model=saltus") for word in given):
        raise ValueError("--chat-template is for the model saltus; leave it out, or leave --model out")
    applied = any(word.startswith("--apply_chat_template") for word in given)
    return [*given, *([] if applied else ["--apply_chat_template"]), "--model_args", f"chat_template={template}"]


def _without_chat_template(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """The arguments without --chat-template, and its value. Errors: ValueError for one without or with a wrong one."""
    from saltus.engine.chat.chat_template import read_chat_template

    rest: list[str] = []
    template, left = None, iter(arguments)
    for word in left:
        name, equals, value = word.partition("=")
        if name != "--chat-template":
            rest.append(word)
            continue
        template = value if equals else next(left, None)
        if template is None:
            raise ValueError("--chat-template needs a name or a file, such as vicuna")
        read_chat_template(template)
        if "," in template:
            raise ValueError(f"lm_eval cannot be given {template}, which has a comma; rename the file")
    return rest, template


def _run(arguments: list[str]) -> None:
    """Run lm_eval. Its own errors keep their traceback. Errors: ValueError for arguments that it does not know."""
    import traceback

    from lm_eval.__main__ import cli_evaluate

    from saltus.loading.fetching import first_line

    before, exiting = sys.argv, ArgumentParser.error
    sys.argv, ArgumentParser.error = ["lm_eval", *arguments], _refuse
    try:
        cli_evaluate()
    except ValueError as error:
        if str(error).startswith("Tasks not found"):
            raise ValueError(f"{first_line(error)}; `saltus lm-eval ls tasks` shows all") from None
        raise
    except (OSError, ModuleNotFoundError, MemoryError):
        raise
    except Exception as error:
        traceback.print_exc()
        raise typer.Exit(1) from error
    finally:
        sys.argv, ArgumentParser.error = before, exiting


def _refuse(self: ArgumentParser, message: str) -> NoReturn:
    """Raise ValueError in the form of the other commands' errors."""
    raise ValueError(f"{message}; see `saltus {self.prog} --help`")
