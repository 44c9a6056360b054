"""Say once what an option is called and means; every command that has it uses these."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

MODEL_PANEL, METHOD_PANEL, SAMPLING_PANEL, LENGTH_PANEL, PROMPT_PANEL, OUTPUT_PANEL = (
    "Model",
    "Method",
    "Sampling",
    "Length",
    "Prompt",
    "Output",
)


def _option(panel: str, *names: str, help: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


Model = Annotated[
    str,
    _option(
        MODEL_PANEL,
        "--model",
        "-m",
        metavar="MODEL",
        help="A short name ([i]saltus pull[/i] lists them), a hub id, or a folder.",
    ),
]
Dtype = Annotated[
    str,
    _option(
        MODEL_PANEL,
        "--dtype",
        metavar="TYPE",
        help="float32, bfloat16 or float16; auto is what the model was saved in.",
    ),
]
Device = Annotated[
    str,
    _option(MODEL_PANEL, "--device", metavar="DEVICE", help="cpu, cuda or cuda:1; auto is a GPU where there is one."),
]

Method = Annotated[
    str,
    _option(
        METHOD_PANEL,
        "--method",
        metavar="NAME",
        help="Who guesses: lookup, jacobi+lookup, … ([i]saltus methods[/i] lists them).",
    ),
]
Options = Annotated[
    list[str] | None,
    _option(METHOD_PANEL, "--option", metavar="METHOD.FIELD=VALUE", help="Set an option of a method; may be repeated."),
]
Budget = Annotated[
    int | None,
    _option(METHOD_PANEL, "--budget", metavar="N", min=0, help="Guessed tokens that one call checks, at most."),
]
WholeTrees = Annotated[
    bool,
    _option(METHOD_PANEL, "--whole-trees", help="Check every guess that the budget allows, whether it pays or not."),
]
Rule = Annotated[
    str,
    _option(
        METHOD_PANEL,
        "--rule",
        metavar="RULE",
        help="match keeps the text token for token; reject keeps its law (Leviathan et al. 2023).",
    ),
]

Temperature = Annotated[
    float,
    _option(SAMPLING_PANEL, "--temperature", "-t", metavar="X", help="0 takes the likeliest token; higher dares more."),
]
TopP = Annotated[
    float, _option(SAMPLING_PANEL, "--top-p", metavar="X", help="Keep the likeliest tokens of this joint probability.")
]
TopK = Annotated[
    int, _option(SAMPLING_PANEL, "--top-k", metavar="N", help="Keep the so many likeliest tokens; 0 keeps all.")
]
MinP = Annotated[
    float,
    _option(SAMPLING_PANEL, "--min-p", metavar="X", help="Drop tokens less likely than this share of the likeliest."),
]
RepetitionPenalty = Annotated[
    float,
    _option(SAMPLING_PANEL, "--repetition-penalty", metavar="X", help="Above 1, tokens seen before get less likely."),
]
Seed = Annotated[
    int,
    _option(SAMPLING_PANEL, "--seed", "-s", metavar="N", help="The same seed gives the same text, with every method."),
]

MaxNewTokens = Annotated[
    int, _option(LENGTH_PANEL, "--max-new-tokens", "-n", metavar="N", min=1, help="Tokens of an answer, at most.")
]
Stop = Annotated[
    list[str] | None, _option(LENGTH_PANEL, "--stop", metavar="TEXT", help="End before this text; may be repeated.")
]
IgnoreEos = Annotated[bool, _option(LENGTH_PANEL, "--ignore-eos", help="Write on where the model would end.")]

Prompts = Annotated[
    Path | None,
    _option(
        PROMPT_PANEL,
        "--prompts",
        "-f",
        metavar="FILE",
        help='JSON lines with "prompt", "messages", or "turns" (each answer enters the next turn); - is stdin.',
    ),
]
Limit = Annotated[
    int | None, _option(PROMPT_PANEL, "--limit", metavar="N", min=1, help="Take the first so many prompts of the file.")
]
Raw = Annotated[
    bool, _option(PROMPT_PANEL, "--raw", help="Continue the prompt itself, without the model's chat template.")
]
System = Annotated[
    str | None, _option(PROMPT_PANEL, "--system", metavar="TEXT", help="What the model is told before the prompt.")
]

Colour = Annotated[
    bool | None,
    _option(
        OUTPUT_PANEL,
        "--colour/--no-colour",
        help="Colour the tokens by the call that decided them. [dim]\\[default: in a terminal][/dim]",
        show_default=False,
    ),
]
Json = Annotated[bool, _option(OUTPUT_PANEL, "--json", help="Print JSON, for programs.")]

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_METHOD = "lookup"
