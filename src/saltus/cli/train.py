"""`saltus train`: train what drafts, by a recipe, on texts that the model wrote."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
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


INSTEAD = "Instead of the recipe's."
Arguments = Annotated[list[str] | None, typer.Argument(metavar="ARGUMENT", help="Arguments of a recipe in Python.")]
RecipeName = Annotated[
    str, o.in_panel(RECIPE_PANEL, "--recipe", "-r", metavar="NAME", help="A recipe of --list, or a .toml or .py file.")
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
ListRecipes = Annotated[bool, o.in_panel(RECIPE_PANEL, "--list", help="Show the recipes that come with Saltus.")]

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

        saltus train ptp -r smollm2-adapter --set rank=32 --steps 500 --work runs/32

        saltus train ptp -r smollm2-dflash --teacher teacher --out dflash

    Afterwards: saltus generate --method ptp --option ptp.model=drafter "Who?"

    [bold]A recipe[/bold] is a TOML file. A recipe in Python is a program, run with the arguments
    after [bold]--[/bold]: [i]saltus train ptp -r experiments/taxi_ptp.py -- methods[/i]
    """
MTPC_HELP = f"""Train heads for the method mtpc: the joint distribution of the next tokens.

    {RESUMES}

    The model first reads the teacher's texts once; its hidden states are cached
    on disk, and the heads are trained on them alone. They cannot change a text.

    [bold]Examples[/bold]

        saltus train mtpc --list

        saltus train mtpc --teacher teacher --set circuit=ff --out ff

        saltus train mtpc --teacher teacher --set circuit=btree --from ff --work runs/btree

    Afterwards: saltus generate --method mtpc --option mtpc.model=ff "Who?"
    """
JACOBI_HELP = f"""Train a model, or an adapter of it, to decode blocks in parallel (Jacobi Forcing).

    {RESUMES}

    Its texts are those of [bold]saltus collect jacobi[/bold]. An adapter acts on draft positions
    alone, and the unchanged model verifies: no text changes. With [i]--set trains=model[/i]
    the whole model is trained, and texts are those of the trained model.

    [bold]Examples[/bold]

        saltus train jacobi --list

        saltus train jacobi --teacher trajectories --out adapter

        saltus train jacobi --teacher trajectories --set noise_schedule=any --set mask=clean --work runs/cllm

        saltus train jacobi --teacher trajectories --set trains=model --set learning_rate=1e-5 --out tuned

    Afterwards: saltus generate --method jacobi --option jacobi.model=adapter "Who?"
    or saltus generate --model tuned --method jacobi "Who?"
    """


def _add_command(method: str, default_recipe: str, help: str) -> None:
    """Add `saltus train METHOD`, which trains by a recipe."""

    def command(
        arguments: Arguments = None,
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
            _list_recipes(method)
            return
        from saltus.training.loop.processes import shards_weights
        from saltus.training.objectives import OBJECTIVES
        from saltus.training.recipe import find_recipe, read_recipe

        file = find_recipe(recipe)
        if file.suffix == ".py":
            _run_program(file, arguments or (), change, steps, seed, model, teacher, work, begin, out)
            return
        if arguments:
            raise ValueError(f"{arguments[0]!r} is for a recipe in Python, but {file.name} is settings; use --set")
        chosen = read_recipe(file, change or ())
        if (recipe_method := OBJECTIVES[chosen.kind].method) != method:
            raise ValueError(f"recipe {file.stem} is for {recipe_method}; give it to saltus train {recipe_method}")
        chosen = replace(
            chosen,
            model=model or chosen.model,
            schedule=replace(chosen.schedule, steps=steps or chosen.schedule.steps),
            data=replace(chosen.data, seed=chosen.data.seed if seed is None else seed),
        )
        work = work or Path("runs", file.stem)
        teachers = [_teacher_path(name, work, chosen) for name in teacher or (None,)]
        sharded = shards_weights(fsdp)
        if sharded and (reason := OBJECTIVES[chosen.kind].why_not_sharded(chosen)):
            raise ValueError(reason)
        _train(chosen, file.stem, teachers, work, begin, out or work / chosen.kind, device, sharded)

    train.command(method, help=help)(command)


_add_command("ptp", "smollm2", PTP_HELP)
_add_command("mtpc", "smollm2-heads", MTPC_HELP)
_add_command("jacobi", "smollm2-jacobi", JACOBI_HELP)


@train.command()
def assd(
    arguments: Arguments = None,
    recipe: Annotated[
        str, o.in_panel(RECIPE_PANEL, "--recipe", "-r", metavar="NAME", help="assd, or a recipe in Python, a .py file.")
    ] = "assd",
) -> None:
    """Train a model that fills holes anywhere, from scratch or from weights, on stories or on code.

    [dim]Give the same command again after an interruption: it continues from the last
    checkpoint, and the result is the same.[/dim]

    [bold]Examples[/bold]

        saltus train assd -- --text stories.txt --steps 2000 --out my-stories

        saltus train assd -- --code /usr/lib/python3.12 --length 320 --out my-code

        saltus train assd -- --help

    Afterwards: saltus infill --model my-stories "The cat [[6]] the mouse."
    """
    if recipe == "assd":
        from saltus.cli.progress import progress_meter
        from saltus.methods.assd.training.command import main

        main(arguments or (), progress_meter)
        return
    file = Path(recipe)
    if file.suffix != ".py" or not file.is_file():
        raise ValueError(f"there is no program {recipe}; leave out --recipe, or give it a .py file")
    _run_program(file, arguments or ())


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
    teachers: Sequence[Path],
    work: Path,
    begin: Path | None,
    out: Path,
    device: str,
    sharded: bool,
) -> None:
    from saltus.training.run import open_run, select_teacher_texts

    tensorboard = summary_writer()
    from saltus.cli.open_engine import open_engine
    from saltus.engine.checkpoints import resolve_device
    from saltus.evaluation.reports.environment import git_commit, machine_info
    from saltus.training.loop.checkpoint import lock_folder
    from saltus.training.loop.processes import join_processes

    on_cpu = resolve_device(device) == "cpu"  # where the exact kernels read texts faster, too

    def load_engine(model: str) -> Any:
        where, exact = ("cpu", False) if sharded else (device, on_cpu)  # only a part of it may fit on a GPU
        return open_engine(model, "plain", None, dtype=recipe.dtype, device=where, exact=exact, weights="bf16")

    with join_processes(resolve_device(device)) as processes:
        samples = select_teacher_texts(recipe, *teachers)
        run = open_run(recipe, samples, teachers, work, begin, load_engine, processes, sharded)
        with lock_folder(work) if processes.is_main else nullcontext():
            processes.wait()  # until the folder is locked
            _collect_with_progress(run)
            task = run.make_task()
            results = _train_with_progress(run, task, tensorboard)
            run.save(task, out, name, results, {"machine": machine_info(), "commit": git_commit()})
        if processes.is_main:
            _print_result(out, results)


def _print_result(out: Path, results: dict[str, Any]) -> None:
    from saltus.cli.answers import print_note

    rates = ", ".join(f"{name} {value:.2f}" for name, value in results["held_out_tokens_per_call"].items())
    print_note(f"written: {out}" + (f"; held-out tokens per call: {rates}" if rates else ""))


def _collect_with_progress(run: Any) -> None:
    from saltus.cli.progress import progress_meter

    live = run.processes.is_main
    try:
        with progress_meter(len(run.samples), "reading", live) as show:
            for done in run.collect():
                show(done, "texts")
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted; texts read so far are kept in {run.data_folder}, the same command goes on"
        ) from None


def _train_with_progress(run: Any, task: Any, tensorboard: Callable[..., Any]) -> dict[str, Any]:
    """Train, with a bar on a terminal, lines elsewhere, and curves for TensorBoard."""
    from saltus.cli.answers import print_note
    from saltus.cli.progress import progress_meter

    curves = TrainingLog(tensorboard, run.work_folder / "tensorboard", task.queries_per_step)
    steps, saved = run.recipe.schedule.steps, 0
    if not run.processes.is_main:
        return run.train(task, lambda progress: None, lambda step, loss: None)

    def on_step(step: int, loss: float) -> None:
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
        with progress_meter(steps, "training") as show:
            return run.train(task, on_checkpoint, on_step)
    except KeyboardInterrupt:
        at = f" at step {curves.last_step:,}" if curves.last_step else ""
        last = "the last checkpoint" if run.checkpoint_path.exists() else "the beginning"
        onward = f"from {f'step {saved:,}' if saved else last}"
        raise KeyboardInterrupt(f"interrupted{at}; the same command goes on {onward}") from None
    finally:
        curves.close()


def _run_program(file: Path, arguments: Sequence[str], *options: object) -> None:
    """Run a recipe in Python as a main program.

    Errors: ValueError if an option for TOML recipes is given, and for a fault of the program.
    """
    import runpy

    from saltus.cli.errors import INTERNAL_ERROR, describe_error
    from saltus.training.loop.processes import launched_processes

    if launched_processes() > 1:
        raise ValueError(f"{file} is a program, which runs in one process; start it without a launcher")
    if any(option is not None for option in options):
        raise ValueError(f"{file} is a program, and takes its own options; put them after --")
    old_argv, old_path = sys.argv, sys.path[:]
    sys.argv, sys.path[0:0] = [str(file), *arguments], [str(file.resolve().parent)]
    try:
        runpy.run_path(str(file), run_name="__main__")
    except Exception as error:
        if describe_error(error)[1] != INTERNAL_ERROR:
            raise
        raise ValueError(f"recipe {file} failed: {error!r}; SALTUS_DEBUG=1 shows where") from error
    finally:
        sys.argv, sys.path[:] = old_argv, old_path


def _list_recipes(method: str) -> None:
    from rich import box
    from rich.table import Table

    from saltus.cli.coloured_text import terminal
    from saltus.training.objectives import OBJECTIVES
    from saltus.training.recipe import RECIPES_FOLDER, read_recipe, shipped_recipes

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for head in ("recipe", "trains", "takes"):
        table.add_column(head, no_wrap=head == "recipe")
    for name in shipped_recipes():
        recipe = read_recipe(RECIPES_FOLDER / f"{name}.toml")
        if OBJECTIVES[recipe.kind].method == method:
            table.add_row(name, recipe.about, recipe.time)
    terminal(soft_wrap=False).print(table)
