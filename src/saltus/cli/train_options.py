"""The options of `saltus train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from saltus.cli import options as o

RECIPE_PANEL, WORK_PANEL = "Recipe", "Work"
INSTEAD = "Instead of the recipe's."
RecipeName = Annotated[
    str, o.in_panel(RECIPE_PANEL, "--recipe", "-r", metavar="NAME", help="A recipe of --list, or a .toml file.")
]
Overrides = Annotated[
    list[str] | None,
    o.in_panel(
        RECIPE_PANEL, "--set", metavar="KEY=VALUE", help="Change a setting of it, such as rank=32; may be repeated."
    ),
]
Steps = Annotated[int | None, o.in_panel(RECIPE_PANEL, "--steps", metavar="N", min=1, help=INSTEAD)]
Seed = Annotated[int | None, o.in_panel(RECIPE_PANEL, "--seed", "-s", metavar="N", min=0, help=INSTEAD)]
Model = Annotated[str | None, o.in_panel(RECIPE_PANEL, "--model", "-m", metavar="MODEL", help=INSTEAD)]
Teachers = Annotated[
    list[Path] | None,
    o.in_panel(
        WORK_PANEL,
        "--teacher",
        metavar="PATH",
        help="Texts of the model: a folder of [i]saltus collect text[/i], or one .jsonl or .jsonl.gz of its kind;"
        " for jacobi a folder of [i]saltus collect jacobi[/i]; may be repeated. [dim]\\[default: WORK/teacher][/dim]",
    ),
]
Texts = Annotated[
    list[Path] | None,
    o.in_panel(
        WORK_PANEL,
        "--text",
        "--code",
        metavar="PATH",
        help="Stories: a plain text with empty lines between them, or a .csv with [i]document_id[/i] and [i]text[/i], a"
        " sentence a row. Programs: a folder, whose Python functions are the texts, or a .jsonl with [i]code[/i] and"
        " perhaps [i]text[/i], its description. May be repeated.",
    ),
]
Work = Annotated[
    Path | None,
    o.in_panel(
        WORK_PANEL,
        "--work",
        metavar="DIR",
        help="States, checkpoint and curves (tensorboard). [dim]\\[default: runs/NAME][/dim]",
    ),
]
InitialFolder = Annotated[
    Path | None,
    o.in_panel(
        WORK_PANEL,
        "--from",
        metavar="DIR",
        help="Start with the weights of an earlier result, in another work folder; for example with more texts.",
    ),
]
Fsdp = Annotated[
    bool,
    o.in_panel(
        WORK_PANEL,
        "--fsdp",
        help="Distribute the weights of the frozen model over the processes (FSDP2): for adapters of large models.",
    ),
]
Out = Annotated[
    Path | None,
    o.in_panel(o.OUTPUT_PANEL, "--out", metavar="DIR", help="The result. [dim]\\[default: WORK/KIND][/dim]"),
]
ListRecipes = Annotated[bool, o.in_panel(RECIPE_PANEL, "--list", help="Show the recipes of the method.")]
