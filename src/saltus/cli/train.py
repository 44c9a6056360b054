"""`saltus train`: train what drafts, by a recipe, on texts that the model wrote."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, no_type_check

import typer
from typer.core import TyperGroup

from saltus.cli import options as o
from saltus.cli.recipes import list_recipes, recipes_of
from saltus.cli.training_log import TrainingLog, summary_writer
from saltus.cli.training_result import check_result_folder, print_result

RECIPE_PANEL, WORK_PANEL = "Recipe", "Work"


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

RESUMES = """[dim]Give the same command again after an interruption: it continues from the last
    checkpoint, and the result is the same.[/dim]"""
PTP_HELP = f"""Train a drafter, or an adapter, for the method ptp.

    {RESUMES}

    The model first reads the teacher's texts once; its hidden states, or the
    intervals of uniforms, are cached on disk. A drafter is a small network beside
    the model. An adapter is a low-rank part of it that acts on draft positions
    alone. Neither can change a text.

    [bold]Examples[/bold]

        saltus train ptp --list

        saltus train ptp --recipe smollm2 --teacher teacher --out drafter

        saltus train ptp -r smollm2-adapter --teacher teacher --set rank=32 --work runs/32

        saltus train ptp -r smollm2-adapter --teacher teacher --set loss=bce --work runs/bce

        saltus train ptp -r smollm2-dflash --teacher teacher --out dflash

    Afterwards: saltus generate --method ptp --option ptp.model=drafter "Who?"

    [bold]A recipe[/bold] is a TOML file. A wrong [i]--set[/i] lists the settings that it may have.
    """
MTP_HELP = f"""Train a head for multi-token prediction, for a model whose checkpoint has none.

    {RESUMES}

    The model first reads the teacher's texts once; its last hidden states are
    cached on disk. The head is a projection and one layer like the model's. It is
    trained to go on with its own output, as it does when it drafts. It cannot
    change a text.

    [bold]Examples[/bold]

        saltus train mtp --teacher teacher --out head

        saltus train mtp --teacher teacher --set mtp-head.window=6 --work runs/six

    Afterwards: saltus generate --method mtp --option mtp.model=head "Who?"
    """
MTPC_HELP = f"""Train heads for the method mtpc: the joint distribution of the next tokens.

    {RESUMES}

    The model first reads the teacher's texts once; its hidden states are cached
    on disk, and the heads are trained on them alone. They cannot change a text.

    [bold]Examples[/bold]

        saltus train mtpc --list

        saltus train mtpc --teacher teacher --set circuit=ff --out ff

        saltus train mtpc --teacher teacher --set circuit=btree --from ff --work runs/btree --out btree

    Afterwards: saltus generate --method mtpc --option mtpc.model=ff "Who?"
    """
JACOBI_HELP = f"""Train a model, or an adapter of it, to decode blocks in parallel (Jacobi Forcing).

    {RESUMES}

    Its texts are those of [bold]saltus collect jacobi[/bold]. An adapter acts on draft
    positions alone, and the unchanged model verifies: no text changes. With
    [i]--set trains=model[/i] the whole model is trained, and texts are those of the
    trained model.

    [bold]Examples[/bold]

        saltus train jacobi --list

        saltus train jacobi --teacher trajectories --out adapter

        saltus train jacobi --teacher trajectories --set noise_schedule=any --set mask=clean --work runs/cllm

        saltus train jacobi --teacher trajectories --set trains=model --set learning_rate=1e-5 --work runs/t --out tuned

    Afterwards:

        saltus generate --method jacobi --option jacobi.model=adapter "Who?"

        saltus generate --model tuned --method jacobi "Who?"
    """
ASSD_HELP = f"""Train a model that fills holes anywhere, from scratch or from weights, on stories or on code.

    {RESUMES}

    A hundredth of the texts is held out. After the model the pairwise correction
    of the drafts of assd is trained, in [i]correction_steps[/i].

    [bold]Examples[/bold]

        saltus train assd --list

        saltus train assd --recipe stories --text stories.txt --out my-stories

        saltus train assd --recipe code --code /usr/lib/python3.12 --set max_length=320 --out my-code

        saltus train assd --text tales.csv --from my-stories --set optimizer=adamw --set learning_rate=1e-4

    Afterwards: saltus infill --model my-stories "The cat [[6]] the mouse."
    """


def _recipe_command(method: str, default_recipe: Any) -> Callable[..., None]:
    """`saltus train METHOD`, which trains by a recipe; without a default it is the only one, if there is one."""

    def command(
        recipe: RecipeName = default_recipe,
        change: Overrides = None,
        steps: Steps = None,
        seed: Seed = None,
        model: Model = None,
        device: o.Device = "auto",
        teacher: Teachers = None,
        work: Work = None,
        begin: InitialFolder = None,
        fsdp: Fsdp = False,
        out: Out = None,
        show: ListRecipes = False,
    ) -> None:
        if show:
            list_recipes(method)
            return
        name, chosen = _read_recipe(method, recipe, change, steps, seed, model)
        from saltus.training.loop.processes import shards_weights
        from saltus.training.objectives import OBJECTIVES

        work = work or Path("runs", name)
        teachers = [_teacher_path(path, work, chosen) for path in teacher or (None,)]
        sharded = shards_weights(fsdp)
        if sharded and (reason := OBJECTIVES[chosen.kind].why_not_sharded(chosen)):
            raise ValueError(reason)
        _train(chosen, name, teachers, work, begin, out, device, sharded)

    return command


train.command("ptp", help=PTP_HELP)(_recipe_command("ptp", "smollm2"))
train.command("mtp", help=MTP_HELP)(_recipe_command("mtp", "smollm2-mtp"))
train.command("mtpc", help=MTPC_HELP)(_recipe_command("mtpc", "smollm2-heads"))
train.command("jacobi", help=JACOBI_HELP)(_recipe_command("jacobi", "smollm2-jacobi"))


@train.command(help=ASSD_HELP)
def assd(
    recipe: RecipeName = "stories",
    change: Overrides = None,
    steps: Steps = None,
    seed: Seed = None,
    device: o.Device = "auto",
    text: Texts = None,
    work: Work = None,
    begin: InitialFolder = None,
    out: Out = None,
    show: ListRecipes = False,
) -> None:
    """Train an any-subset model by a recipe."""
    if show:
        list_recipes("assd")
        return
    name, chosen = _read_recipe("assd", recipe, change, steps, seed)
    _train(chosen, name, text or (), work or Path("runs", name), begin, out, device)


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


def _teacher_path(teacher: Path | None, work: Path, recipe: Any) -> Path:
    """The teacher's texts. Errors: ValueError with the command that writes them."""
    path = teacher or work / "teacher"
    if not path.exists():
        from saltus.training.objectives import OBJECTIVES

        temperatures = " ".join(f"--temperature {each:g}" for each in (0.0, *recipe.temperatures))
        template = f" --chat-template {recipe.chat_template}" if recipe.chat_template else ""
        cut = f" --top-k {recipe.top_k}" if recipe.top_k else ""
        cut += f" --top-p {recipe.top_p:g}" if recipe.top_p < 1 else ""
        raise ValueError(
            f"there is no teacher text in {path}; let the model write it first:"
            f" saltus collect {OBJECTIVES[recipe.kind].collect_command} --model {recipe.model}{template} --prompts FILE"
            f" {temperatures}{cut} --out {path}"
        )
    return path


def _train(
    recipe: Any,
    name: str,
    texts: Sequence[Path],
    work: Path,
    begin: Path | None,
    out: Path | None,
    device: str,
    sharded: bool = False,
) -> None:
    from saltus.training.run import open_run

    tensorboard = summary_writer()
    from saltus.cli.open_engine import open_engine
    from saltus.engine.checkpoints import resolve_device
    from saltus.evaluation.reports.environment import git_commit, machine_info
    from saltus.loading.load_model import silence_transformers
    from saltus.training.loop.checkpoint import lock_folder
    from saltus.training.loop.processes import join_processes

    folder, resolved = out or work / recipe.kind, resolve_device(device)
    check_result_folder(folder, recipe)
    on_cpu = resolved == "cpu"  # where the exact kernels read texts faster, too

    def load_engine(model: str) -> Any:
        where, exact = ("cpu", False) if sharded else (device, on_cpu)  # only a part of it may fit on a GPU
        return open_engine(model, "plain", None, dtype=recipe.dtype, device=where, exact=exact, weights="bf16")

    with silence_transformers(), join_processes(resolved) as processes:
        run = open_run(recipe, texts, work, begin, load_engine, processes, sharded, resolved)
        with lock_folder(work) if processes.is_main else nullcontext():
            processes.wait()  # until the folder is locked
            _collect_with_progress(run)
            trained = [(task, _train_with_progress(run, task, tensorboard)) for task in run.tasks()]
            for task, results in trained:
                run.save(task, folder, name, results, {"machine": machine_info(), "commit": git_commit()})
        if processes.is_main:
            print_result(folder, trained, run)


def _collect_with_progress(run: Any) -> None:
    from saltus.cli.progress import progress_meter

    live = run.processes.is_main
    try:
        with progress_meter(len(run.samples), "reading texts", live, in_logs=True) as show:
            for done in run.collect():
                show(done)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted; texts read so far are kept in {run.data_folder}, the same command goes on"
        ) from None


def _train_with_progress(run: Any, task: Any, tensorboard: Callable[..., Any]) -> dict[str, Any]:
    """Train, with a bar on a terminal, lines elsewhere, and curves for TensorBoard."""
    from saltus.cli.answers import print_note
    from saltus.cli.progress import progress_meter

    curves = TrainingLog(tensorboard, run.task_folder(task) / "tensorboard", task)
    steps, saved = run.schedule(task).steps, 0
    if not run.processes.is_main:
        return run.train(task, lambda progress: None, lambda step, loss: None)

    def on_step(step: int, loss: float) -> None:
        if step > 1 and curves.last_step == 0 and not sys.stderr.isatty():
            print_note(f"going on from step {step - 1:,}")
        curves.step(step, loss)
        show(step, curves.status_line)

    def on_checkpoint(progress: Any) -> None:
        nonlocal saved
        saved = progress.step
        curves.checkpoint(progress)
        if not sys.stderr.isatty():
            print_note(
                f"step {progress.step:,} of {steps:,}: {curves.status_line}, {progress.seconds_left / 60:.0f} min left"
            )

    try:
        with progress_meter(steps, task.phase or "training") as show:
            return run.train(task, on_checkpoint, on_step)
    except KeyboardInterrupt as stopped:
        if stopped.args:
            raise
        at = f" at step {curves.last_step:,}" if curves.last_step else ""
        last = "the last checkpoint" if run.checkpoint_path(task).exists() else "the beginning"
        onward = f"from {f'step {saved:,}' if saved else last}"
        raise KeyboardInterrupt(f"interrupted{at}; the same command goes on {onward}") from None
    finally:
        curves.close()
