"""`saltus train`: train what drafts, by a recipe, on texts that the model wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, no_type_check

import typer
from typer.core import TyperGroup

from saltus.cli import options as o
from saltus.cli import train_help
from saltus.cli import train_options as t
from saltus.cli.recipes import list_recipes, recipes_of
from saltus.cli.training_run import teacher_path, train_by_recipe

METHODS = Path(__file__).parents[1] / "methods"


class TrainCommands(TyperGroup):
    """The trainings that this file describes. Others are found by name, since looking for all takes time: those of a
    method's folder, and of other packages.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        ours = super().list_commands(ctx)
        return [*ours, *sorted({point.name for point in entry_points(group="saltus.objectives")} - set(ours))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is not None:
            return found
        is_trained = (METHODS / cmd_name / "drafter.py").is_file() and (METHODS / cmd_name / "training").is_dir()
        if is_trained or entry_points(group="saltus.objectives", name=cmd_name):
            other = typer.Typer(add_completion=False)
            other.command(cmd_name, help=f"Train what {cmd_name} drafts with.")(_recipe_command(cmd_name, ""))
            made = typer.main.get_command(other)
            o.show_no_type_of_flags(made)
            return made
        return found


train = typer.Typer(cls=TrainCommands, invoke_without_command=True, rich_markup_mode="rich")


@train.callback()
@no_type_check  # typer calls it with the context of its own click
def train_(context: typer.Context) -> None:
    """Train what drafts for a model.

    [bold]Examples[/bold]

        saltus train ptp --teacher teacher --out drafter

        saltus train mtpc --teacher teacher --set circuit=cp --out heads

    [bold]saltus train COMMAND --help[/bold] shows the options of a command, with examples.
    """
    if not context.invoked_subcommand:
        typer.echo(context.get_help())


def _recipe_command(method: str, default_recipe: Any) -> Callable[..., None]:
    """`saltus train METHOD`, which trains by a recipe; without a default it is the only one, if there is one."""

    def command(
        recipe: t.RecipeName = default_recipe,
        change: t.Overrides = None,
        steps: t.Steps = None,
        seed: t.Seed = None,
        model: t.Model = None,
        device: o.Device = "auto",
        teacher: t.Teachers = None,
        work: t.Work = None,
        begin: t.InitialFolder = None,
        fsdp: t.Fsdp = False,
        out: t.Out = None,
        show: t.ListRecipes = False,
    ) -> None:
        if show:
            list_recipes(method)
            return
        name, chosen = _read_recipe(method, recipe, change, steps, seed, model)
        from saltus.training.loop.processes import shards_weights
        from saltus.training.objectives import OBJECTIVES

        work = work or Path("runs", name)
        teachers = [teacher_path(path, work, chosen) for path in teacher or (None,)]
        sharded = shards_weights(fsdp)
        if sharded and (reason := OBJECTIVES[chosen.kind].why_not_sharded(chosen)):
            raise ValueError(reason)
        train_by_recipe(chosen, name, teachers, work, begin, out, device, sharded)

    return command


train.command("ptp", help=train_help.PTP)(_recipe_command("ptp", "smollm2"))
train.command("mtp", help=train_help.MTP)(_recipe_command("mtp", "smollm2-mtp"))
train.command("mtpc", help=train_help.MTPC)(_recipe_command("mtpc", "smollm2-heads"))
train.command("jacobi", help=train_help.JACOBI)(_recipe_command("jacobi", "smollm2-jacobi"))


@train.command(help=train_help.ASSD)
def assd(
    recipe: t.RecipeName = "stories",
    change: t.Overrides = None,
    steps: t.Steps = None,
    seed: t.Seed = None,
    device: o.Device = "auto",
    text: t.Texts = None,
    work: t.Work = None,
    begin: t.InitialFolder = None,
    out: t.Out = None,
    show: t.ListRecipes = False,
) -> None:
    """Train an any-subset model by a recipe."""
    if show:
        list_recipes("assd")
        return
    name, chosen = _read_recipe("assd", recipe, change, steps, seed)
    train_by_recipe(chosen, name, text or (), work or Path("runs", name), begin, out, device)


def _read_recipe(
    method: str,
    recipe: str,
    change: Sequence[str] | None,
    steps: int | None,
    seed: int | None,
    model: str | None = None,
) -> tuple[str, Any]:
    """The name of a recipe, and the recipe with these changes. Errors: ValueError for a recipe of another method."""
    from saltus.cli.answers import print_note
    from saltus.training.objectives import OBJECTIVES
    from saltus.training.recipe import find_recipe, overrides_without_effect, read_recipe

    names = list(recipes_of(method))
    if not recipe and len(names) != 1:
        raise ValueError(f"--recipe is missing; give {' or '.join(names) or 'a .toml file'}")
    file = find_recipe(recipe or names[0], names)
    chosen = read_recipe(file, change or ())
    if (own := OBJECTIVES[chosen.kind].method) != method:
        raise ValueError(f"recipe {file.stem} is for {own}; give it to saltus train {own}")
    for line in overrides_without_effect(chosen, change or ()):
        print_note(line)
    return file.stem, replace(
        chosen,
        model=model or chosen.model,
        schedule=replace(chosen.schedule, steps=steps or chosen.schedule.steps),
        data=replace(chosen.data, seed=chosen.data.seed if seed is None else seed),
    )
