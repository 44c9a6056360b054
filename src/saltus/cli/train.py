"""Train what drafts: recipes in files, on texts that the model wrote itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, no_type_check

import typer

from saltus.cli import options as o
from saltus.cli.training_log import TrainingLog, summary_writer

RECIPE_PANEL, WORK_PANEL = "Recipe", "Work"

train = typer.Typer(invoke_without_command=True, rich_markup_mode="rich")


@train.callback()
@no_type_check  # typer calls it with the context of its own click
def train_(context: typer.Context) -> None:
    """Train what drafts for a model.

    [bold]Examples[/bold]

        saltus train ptp

        saltus train mtpc

        saltus train jacobi

        saltus train assd
    """
    if not context.invoked_subcommand:
        typer.echo(context.get_help())


Arguments = Annotated[list[str] | None, typer.Argument(metavar="ARGUMENT", help="What a recipe in Python is given.")]
RecipeName = Annotated[
    str,
    typer.Option(
        "--recipe",
        "-r",
        metavar="NAME",
        help="A recipe of --list, or a .toml or .py file.",
        rich_help_panel=RECIPE_PANEL,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting of it, such as rank=32; may be repeated.",
        rich_help_panel=RECIPE_PANEL,
    ),
]
Steps = Annotated[
    int | None, typer.Option("--steps", metavar="N", min=1, help="Instead of its own.", rich_help_panel=RECIPE_PANEL)
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", "-s", metavar="N", min=0, help="Instead of its own.", rich_help_panel=RECIPE_PANEL),
]
Model = Annotated[
    str | None, typer.Option("--model", "-m", metavar="MODEL", help="Instead of its own.", rich_help_panel=RECIPE_PANEL)
]
Teacher = Annotated[
    Path | None,
    typer.Option(
        "--teacher",
        metavar="PATH",
        help="Texts of the model: a folder of [i]saltus collect text[/i], or one .jsonl or .jsonl.gz of its kind;"
        " for jacobi a folder of [i]saltus collect jacobi[/i]. "
        "[dim]\\[default: WORK/teacher][/dim]",
        rich_help_panel=WORK_PANEL,
    ),
]
Work = Annotated[
    Path | None,
    typer.Option(
        "--work",
        metavar="DIR",
        help="States, checkpoint and curves (tensorboard). [dim]\\[default: runs/NAME][/dim]",
        rich_help_panel=WORK_PANEL,
    ),
]
InitialFolder = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="DIR",
        help="Go on with what such a recipe trained before, in a work folder of its own: on more texts, say.",
        rich_help_panel=WORK_PANEL,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="What was trained. [dim]\\[default: WORK/KIND][/dim]",
        rich_help_panel=o.OUTPUT_PANEL,
    ),
]
ListRecipes = Annotated[
    bool, typer.Option("--list", help="Show the recipes that come with Saltus.", rich_help_panel=RECIPE_PANEL)
]


@train.command()
def ptp(
    arguments: Arguments = None,
    recipe: RecipeName = "smollm2",
    change: Overrides = None,
    steps: Steps = None,
    seed: Seed = None,
    model: Model = None,
    device: o.Device = "auto",
    teacher: Teacher = None,
    work: Work = None,
    begin: InitialFolder = None,
    out: Out = None,
    show: ListRecipes = False,
) -> None:
    """Train a drafter, or an adapter, for the method ptp.

    [dim]Give the same command again after an interruption: it goes on from the last
    checkpoint, with the outcome that it would have had.[/dim]

    The model first reads the teacher's texts once; what it understood of them is
    kept. A drafter is a small network beside the model, an adapter a low-rank
    part of it that acts on guesses alone. Neither can change a text.

    [bold]Examples[/bold]

        saltus train ptp --list

        saltus train ptp --recipe smollm2 --teacher teacher --out drafter

        saltus train ptp -r smollm2-adapter --set rank=32 --steps 500 --work runs/32

    Afterwards: saltus generate --method ptp --option ptp.model=drafter "Who?"

    [bold]A recipe[/bold] is a TOML file; one in Python is a program, run with what stands
    behind [bold]--[/bold]: [i]saltus train ptp -r recipes/taxi_ptp.py -- methods[/i]
    """
    if show:
        _list_recipes("ptp")
        return
    _run_recipe("ptp", recipe, arguments, change, steps, seed, model, device, teacher, work, begin, out)


@train.command()
def mtpc(
    arguments: Arguments = None,
    recipe: RecipeName = "smollm2-heads",
    change: Overrides = None,
    steps: Steps = None,
    seed: Seed = None,
    model: Model = None,
    device: o.Device = "auto",
    teacher: Teacher = None,
    work: Work = None,
    begin: InitialFolder = None,
    out: Out = None,
    show: ListRecipes = False,
) -> None:
    """Train heads for the method mtpc: the joint law of the next tokens.

    [dim]Give the same command again after an interruption: it goes on from the last
    checkpoint, with the outcome that it would have had.[/dim]

    The model first reads the teacher's texts once; what it understood of them is
    kept, and the heads learn from that alone. They cannot change a text.

    [bold]Examples[/bold]

        saltus train mtpc --list

        saltus train mtpc --teacher teacher --set circuit=ff --out ff

        saltus train mtpc --teacher teacher --set circuit=btree --from ff --work runs/btree

    Afterwards: saltus generate --method mtpc --option mtpc.model=ff "Who?"
    """
    if show:
        _list_recipes("mtpc")
        return
    _run_recipe("mtpc", recipe, arguments, change, steps, seed, model, device, teacher, work, begin, out)


@train.command()
def jacobi(
    arguments: Arguments = None,
    recipe: RecipeName = "smollm2-jacobi",
    change: Overrides = None,
    steps: Steps = None,
    seed: Seed = None,
    model: Model = None,
    device: o.Device = "auto",
    teacher: Teacher = None,
    work: Work = None,
    begin: InitialFolder = None,
    out: Out = None,
    show: ListRecipes = False,
) -> None:
    """Train a model, or an adapter of it, to decode blocks in parallel (Jacobi Forcing).

    [dim]Give the same command again after an interruption: it goes on from the last
    checkpoint, with the outcome that it would have had.[/dim]

    It learns from [bold]saltus collect jacobi[/bold]. An adapter acts on guesses alone, and the
    untouched model verifies: no text changes. With [i]--set trains=model[/i] the whole
    model is trained, and texts are those of the trained model.

    [bold]Examples[/bold]

        saltus train jacobi --list

        saltus train jacobi --teacher trajectories --out adapter

        saltus train jacobi --teacher trajectories --set schedule=any --set mask=clean --work runs/cllm

        saltus train jacobi --teacher trajectories --set trains=model --set rate=1e-5 --work runs/model --out tuned

    Afterwards: saltus generate --method jacobi --option jacobi.model=adapter "Who?"
    or saltus generate --model tuned --method jacobi "Who?"
    """
    if show:
        _list_recipes("jacobi")
        return
    _run_recipe("jacobi", recipe, arguments, change, steps, seed, model, device, teacher, work, begin, out)


@train.command()
def assd(
    arguments: Arguments = None,
    recipe: Annotated[
        str,
        typer.Option("--recipe", "-r", metavar="FILE", help="A recipe in Python.", rich_help_panel=RECIPE_PANEL),
    ] = "recipes/assd.py",
) -> None:
    """Train a model that fills holes anywhere, from scratch or from weights, on stories or on code.

    [dim]Give the same command again after an interruption: it goes on from the last
    checkpoint, with the outcome that it would have had.[/dim]

    [bold]Examples[/bold]

        saltus train assd -- --text stories.txt --steps 2000 --out my-stories

        saltus train assd -- --code /usr/lib/python3.12 --length 320 --out my-code

        saltus train assd -- --help

    Afterwards: saltus infill --model my-stories "The cat [[6]] the mouse."
    """
    file = Path(recipe)
    if file.suffix != ".py" or not file.is_file():
        raise ValueError(f"there is no program {recipe}; give --recipe a .py file, such as this one of the repository")
    _run_program(file, arguments or ())


def _run_recipe(
    method: str,
    recipe: str,
    arguments: Sequence[str] | None,
    change: Sequence[str] | None,
    steps: int | None,
    seed: int | None,
    model: str | None,
    device: str,
    teacher: Path | None,
    work: Path | None,
    begin: Path | None,
    out: Path | None,
) -> None:
    from saltus.training.recipe import find_recipe, read_recipe

    file = find_recipe(recipe)
    if file.suffix == ".py":
        _run_program(file, arguments or (), change, steps, seed, model, teacher, work, begin, out)
        return
    if arguments:
        raise ValueError(f"{arguments[0]!r} is for a recipe in Python, but {file.name} is settings; use --set")
    chosen = read_recipe(file, change or ())
    if chosen.method != method:
        raise ValueError(f"recipe {file.stem} is for {chosen.method}; give it to saltus train {chosen.method}")
    chosen = replace(
        chosen,
        model=model or chosen.model,
        schedule=replace(chosen.schedule, steps=steps or chosen.schedule.steps),
        lessons=replace(chosen.lessons, seed=chosen.lessons.seed if seed is None else seed),
    )
    work = work or Path("runs", file.stem)
    _train(chosen, file.stem, _teacher_path(teacher, work, chosen), work, begin, out or work / chosen.kind, device)


def _teacher_path(teacher: Path | None, work: Path, recipe: Any) -> Path:
    """The texts to learn from. Errors: ValueError that says how to get them."""
    found = teacher or work / "teacher"
    if not found.exists():
        kinds = " ".join(f"--temperature {each:g}" for each in (0.0, *recipe.temperatures))
        what = "jacobi" if recipe.kind == "forcing" else "text"
        raise ValueError(
            f"there is no teacher text in {found}; let the model write it first:"
            f" saltus collect {what} --model {recipe.model} --prompts FILE {kinds} --out {found}"
        )
    return found


def _train(recipe: Any, name: str, teacher: Path, work: Path, begin: Path | None, out: Path, device: str) -> None:
    from saltus.training.run import TrainingRun, check_teacher_model, select_teacher_texts

    samples, tensorboard = select_teacher_texts(recipe, teacher), summary_writer()
    from saltus.cli.answers import print_note
    from saltus.cli.open_engine import open_engine
    from saltus.training.loop.checkpoint import lock_folder

    engine = open_engine(recipe.model, "plain", None, dtype=recipe.dtype, device=device, exact=False)
    check_teacher_model(teacher, engine.network.model, recipe.model)
    student = _load_student(recipe, engine, device)
    run = TrainingRun(recipe, engine.network, recipe.model, work, begin, student, engine.tokenizer)
    with lock_folder(work):
        _collect_with_progress(run, samples)
        course = run.make_task(samples)
        found = _train_with_progress(run, course, tensorboard)
        tokens = sum(len(sample.prompt) + len(sample.completion) for sample in samples)
        course.save(out, _training_card(recipe, name, begin, len(samples), tokens, found))
    counted = found["held_out_tokens_per_call"]
    rates = ", ".join(f"{each} {value:.2f}" for each, value in counted.items())
    print_note(f"written: {out}" + (f"; held-out tokens per call: {rates}" if rates else ""))


def _load_student(recipe: Any, teacher: Any, device: str) -> Any:
    """The model that is to draft for the teacher, where that is another. Errors: ValueError for another vocabulary."""
    if recipe.kind != "adapter" or not recipe.adapter.student:
        return None
    from saltus.cli.open_engine import open_engine
    from saltus.networks.loading.checkpoints import require_same_vocabulary

    student = open_engine(recipe.adapter.student, "plain", None, dtype=recipe.dtype, device=device, exact=False)
    require_same_vocabulary(teacher.target, student.target)
    return student.network.model


def _collect_with_progress(run: Any, samples: Sequence[Any]) -> None:
    from saltus.cli.progress import progress_meter

    try:
        with progress_meter(len(samples), "reading") as tell:
            for done in run.collect(list(samples)):
                tell(done, "texts")
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted; what was read is kept in {run.data_folder}, the same command goes on"
        ) from None


def _train_with_progress(run: Any, task: Any, tensorboard: Callable[..., Any]) -> dict[str, Any]:
    """Train, with a bar on a terminal, lines elsewhere, and curves for TensorBoard."""
    from saltus.cli.answers import print_note
    from saltus.cli.progress import progress_meter

    curves = TrainingLog(tensorboard, run.work_folder / "tensorboard", run.queries_per_step(task))
    steps, saved = run.recipe.schedule.steps, 0

    def watch(step: int, loss: float) -> None:
        curves.step(step, loss)
        tell(step, curves.status_line)

    def report(progress: Any) -> None:
        nonlocal saved
        saved = progress.step
        curves.checkpoint(progress)
        if not sys.stderr.isatty():
            print_note(
                f"step {progress.step:,} of {steps:,}: {curves.status_line}, {progress.seconds_left / 60:.0f} min left"
            )

    try:
        with progress_meter(steps, "training") as tell:
            return run.train(task, report, watch)
    except KeyboardInterrupt:
        at = f" at step {curves.last_step:,}" if curves.last_step else ""
        last = "the last checkpoint" if run.checkpoint_path.exists() else "the beginning"
        onward = f"from {f'step {saved:,}' if saved else last}"
        raise KeyboardInterrupt(f"interrupted{at}; the same command goes on {onward}") from None
    finally:
        curves.close()


def _training_card(
    recipe: Any, name: str, begin: Path | None, texts: int, tokens: int, found: dict[str, Any]
) -> dict[str, Any]:
    from saltus.evaluation.reports.environment import git_commit, machine_info

    return {
        "recipe": {"name": name, **recipe.settings},
        **({} if begin is None else {"begun_with": str(begin)}),
        "teacher_texts": texts,
        "teacher_tokens": tokens,
        "steps": recipe.schedule.steps,
        "seed": recipe.lessons.seed,
        **found,
        "machine": machine_info(),
        "commit": git_commit(),
    }


def _run_program(file: Path, arguments: Sequence[str], *options: object) -> None:
    """As python would run it."""
    import runpy

    if any(option is not None for option in options):
        raise ValueError(f"{file} is a program, and takes its own options; put them behind --")
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[0:0] = [str(file), *arguments], [str(file.resolve().parent)]
    try:
        runpy.run_path(str(file), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before


def _list_recipes(method: str) -> None:
    from rich import box
    from rich.table import Table

    from saltus.cli.coloured_text import terminal
    from saltus.training.recipe import RECIPES_FOLDER, read_recipe, shipped_recipes

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for head in ("recipe", "trains", "takes"):
        table.add_column(head, no_wrap=head == "recipe")
    for name in shipped_recipes():
        recipe = read_recipe(RECIPES_FOLDER / f"{name}.toml")
        if recipe.method == method:
            table.add_row(name, recipe.about, recipe.time)
    terminal(soft_wrap=False).print(table)
