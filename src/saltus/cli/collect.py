"""`saltus collect`: the texts for training, written by a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, no_type_check

import typer

from saltus.cli import options as o
from saltus.cli.collect_from_server import ServerOptions, collect_from_server
from saltus.cli.collection import read_inputs, show_progress, tokenize_prompts, training_command

WORK_PANEL = "Work"

collect = typer.Typer(invoke_without_command=True, rich_markup_mode="rich")


@collect.callback()
@no_type_check  # typer calls it with the context of its own click
def collect_(context: typer.Context) -> None:
    """Collect texts for training, or a model's hidden states of them for other trainers.

    [bold]Examples[/bold]

        saltus collect text --prompts prompts.jsonl --out teacher

        saltus collect jacobi --prompts prompts.jsonl --out trajectories

    [bold]saltus collect COMMAND --help[/bold] shows the options of a command, with examples.
    """
    if not context.invoked_subcommand:
        typer.echo(context.get_help())


Prompts = Annotated[
    Path,
    o.in_panel(
        o.PROMPT_PANEL,
        "--prompts",
        "-f",
        metavar="FILE",
        help='JSON lines with "prompt" or "messages", or (.txt) a prompt a line; - is stdin.',
    ),
]
Out = Annotated[
    Path, o.in_panel(o.OUTPUT_PANEL, "--out", metavar="DIR", help="The texts; a repeated command continues there.")
]
NoBatchInvariant = Annotated[
    bool,
    o.in_panel(
        o.MODEL_PANEL,
        "--no-batch-invariant",
        help="Round differently in batches of another shape: a GPU may be faster, but texts depend on batches.",
    ),
]
Temperatures = Annotated[
    list[float] | None,
    o.in_panel(
        o.SAMPLING_PANEL,
        "--temperature",
        "-t",
        metavar="X",
        help="0 takes the likeliest token; may be repeated. [dim]\\[default: 0 and 0.7][/dim]",
        show_default=False,
    ),
]
BatchSize = Annotated[int, o.in_panel(WORK_PANEL, "--batch-size", metavar="N", min=1, help="Texts written together.")]
Processes = Annotated[
    int, o.in_panel(WORK_PANEL, "--processes", metavar="N", min=1, help="Each loads the model; they share threads.")
]
TextsPerFile = Annotated[int, o.in_panel(WORK_PANEL, "--texts-per-file", metavar="N", min=1, help="Texts of a file.")]
Ray = Annotated[
    str | None,
    o.in_panel(
        WORK_PANEL,
        "--ray",
        metavar="ADDRESS",
        help="Use the machines of this Ray cluster; [i]local[/i] is this machine, [i]auto[/i] the cluster that it"
        " belongs to. All machines must share the disk of DIR.",
    ),
]


@dataclass(frozen=True)
class CollectionOptions:
    """The options of all collecting commands."""

    limit: o.Limit = None
    model: o.Model = o.DEFAULT_MODEL
    dtype: o.Dtype = "auto"
    device: o.Device = "auto"
    chat_template: o.ChatTemplate = None
    no_batch_invariant: NoBatchInvariant = False
    temperature: Temperatures = None
    top_p: o.TopP = 1.0
    top_k: o.TopK = 0
    coupling: o.Coupling = o.DEFAULT_COUPLING
    seed: o.Seed = 0
    max_new_tokens: o.MaxNewTokens = 256
    batch_size: BatchSize = 16
    processes: Processes = 1
    ray: Ray = None
    texts_per_file: TextsPerFile = 128


@collect.command()
@o.with_options()
def text(*, prompts: Prompts, out: Out, server: ServerOptions, collection: CollectionOptions) -> None:
    """Let a model answer prompts, and write the answers as token ids.

    [dim]Give the same command again after an interruption: it writes the files that
    are missing, also with more prompts behind the same first ones. A text depends
    on the seed and on the number of its prompt, not on batches or processes.[/dim]

    [bold]Examples[/bold]

        saltus collect text --prompts prompts.jsonl --out teacher

        saltus collect text -f prompts.txt -t 0 -t 0.7 -t 1 -n 160 --out teacher

        saltus collect text -f prompts.jsonl --out teacher --processes 4

        saltus collect text -f prompts.jsonl --endpoint http://localhost:8000 -m Qwen/Qwen3-4B --out teacher

    The files of [bold]DIR[/bold] are 00000.jsonl.gz and so on, with source, temperature,
    prompt and completion in each line, and collect.json, with model and settings.
    [bold]saltus train ptp[/bold] reads it.
    """
    if server.endpoint is None and server.served_model is not None:
        raise ValueError("--served-model names a model of --endpoint; give an endpoint, or leave it out")
    if server.endpoint is not None:
        _collect_from_server(prompts, out, collection, server)
        return
    training = training_command("ptp", out, collection.model)
    _collect_texts(prompts, out, collection, {"method": "plain", "options": {}}, {}, training)


@collect.command()
@o.with_options()
def jacobi(
    *,
    prompts: Prompts,
    out: Out,
    block_size: Annotated[
        int, o.in_panel(o.SAMPLING_PANEL, "--block-size", "-b", metavar="N", min=2, max=128, help="Tokens of a block.")
    ] = 16,
    adapter: Annotated[
        Path | None,
        o.in_panel(
            o.MODEL_PANEL,
            "--adapter",
            metavar="DIR",
            help="Draft with this adapter of [i]saltus train jacobi[/i], for another round of training.",
        ),
    ] = None,
    collection: CollectionOptions,
) -> None:
    """Let a model answer prompts by Jacobi decoding, and write every iterate of every block.

    [dim]Give the same command again after an interruption: it writes the files that
    are missing, also with more prompts behind the same first ones. A text depends
    on the seed and on the number of its prompt, not on batches, processes or
    machines.[/dim]

    [bold]Examples[/bold]

        saltus collect jacobi --prompts prompts.jsonl --out trajectories

        saltus collect jacobi -f prompts.jsonl -t 0 --block-size 32 -m tuned --out round-2

        saltus collect jacobi -f prompts.jsonl --out /shared/trajectories --ray auto --processes 8

    The files of [bold]DIR[/bold] are those of [bold]saltus collect text[/bold], and each line also has
    [i]iterates[/i]: for each call the number of decided tokens, and the guesses after
    them. [bold]saltus train jacobi[/bold] reads it.
    """
    options: dict[str, Any] = {"block_size": block_size, "max_blocks": 1, "candidates": 0}
    if adapter is not None:
        options["model"] = str(adapter)
    method = {"method": "jacobi", "options": {"jacobi": options}, "max_draft_tokens": block_size, "adaptive": False}
    training = training_command("jacobi", out, collection.model)
    if adapter is not None:  # in a work folder of its own
        training += f" --from {quote(str(adapter))} --work {quote(str(Path('runs', out.name)))}"
    _collect_texts(prompts, out, collection, method, {"block_size": block_size}, training)


def _collect_texts(
    prompts: Path,
    out: Path,
    given: CollectionOptions,
    method: dict[str, Any],
    plan_settings: dict[str, Any],
    training: str,
) -> None:
    inputs = read_inputs(prompts, given.limit)
    load_options: dict[str, Any] = {
        "model": given.model, "dtype": given.dtype, "device": given.device,
        "exact": not given.no_batch_invariant, **method,
    }  # fmt: skip
    settings = _plan_settings(given) | plan_settings
    from saltus.engine.chat.chat_template import read_chat_template
    from saltus.training.data.teacher_texts import CollectionPlan

    CollectionPlan((), **settings)  # it raises errors for its settings before a model is loaded
    if given.chat_template is not None:
        read_chat_template(given.chat_template)
    from saltus.cli.open_engine import open_engine
    from saltus.training.data.collection_workers import collect_in_process, collect_in_processes, collect_with_ray
    from saltus.training.data.teacher_texts import missing_shards, prepare_folder
    from saltus.training.loop.checkpoint import lock_folder

    engine = open_engine(
        **load_options, chat_template=given.chat_template, batch_size=given.batch_size, tuned_settings=False
    )
    load_options["device"] = str(engine.network.model.device)  # the same for every process
    context, block_size = engine.target.context_length, settings.get("block_size", 0)
    if context is not None and block_size >= context:
        raise ValueError(
            f"a block has {block_size} tokens, but {engine.target.name} reads {context} in all;"
            " take a smaller --block-size"
        )
    plan = CollectionPlan(tokenize_prompts(engine.tokenizer, engine.target.name, context, inputs, prompts), **settings)
    with lock_folder(out):
        missing = prepare_folder(out, plan, plan.metadata(engine))
        if given.ray is not None and missing:
            del engine
            progress = collect_with_ray(plan, missing, out, load_options, given.batch_size, given.processes, given.ray)
        elif given.processes > 1 and len(missing) > 1:
            del engine
            progress = collect_in_processes(plan, missing, out, load_options, given.batch_size, given.processes)
        else:
            progress = collect_in_process(engine, plan, missing, out, given.batch_size)
        show_progress(progress, plan, missing, out, training)
        if lost := len(missing_shards(out, plan)):
            raise ValueError(f"{out} lacks {lost} files that were written; is it on a disk that all machines share?")


def _collect_from_server(prompts: Path, out: Path, given: CollectionOptions, server: ServerOptions) -> None:
    local = {
        "--ray": given.ray is not None,
        "--processes": given.processes > 1,
        "--no-batch-invariant": given.no_batch_invariant,
        "--coupling": given.coupling != o.DEFAULT_COUPLING,
    }
    local |= {"--device": given.device != "auto", "--dtype": given.dtype != "auto"}
    if wrong := next((name for name, used in local.items() if used), None):
        raise ValueError(f"{wrong} is for a model that is loaded here, but --endpoint is given; leave {wrong} out")
    inputs = read_inputs(prompts, given.limit)
    collect_from_server(
        inputs, prompts, out, server, given.model, given.chat_template, _plan_settings(given), given.batch_size
    )


def _plan_settings(given: CollectionOptions) -> dict[str, Any]:
    return {
        "max_new_tokens": given.max_new_tokens, "seed": given.seed, "texts_per_shard": given.texts_per_file,
        "coupling": given.coupling, "top_k": given.top_k, "top_p": given.top_p,
        "temperatures": tuple(dict.fromkeys(given.temperature or (0.0, 0.7))),
    }  # fmt: skip
