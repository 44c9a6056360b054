"""The pull command."""

from __future__ import annotations

from typing import Annotated

import typer

from saltus.cli.options import DEFAULT_MODEL


def pull(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="Short names, hub ids (owner/name, owner/name@revision), owner/name:file.gguf, owner/name:Q4_K_M.",
        ),
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Only say where the model is; do not touch the network.")
    ] = False,
) -> None:
    """Download models, and print their folders.

    [dim]Existing files are not downloaded again; an interrupted download from a hub continues.[/dim]

    Without a name it is the default model, [bold]smollm2-135m[/bold]. Other short names are
    smollm2-135m-bf16, smollm2-360m, smollm2-1.7b, qwen3-0.6b, qwen3-1.7b,
    qwen3-4b, gpt2; and stories and code, which fill holes ([i]saltus infill[/i]) and
    come with Saltus.

    [bold]Examples[/bold]

        saltus pull

        saltus pull qwen3-0.6b some-owner/some-model@main some-owner/some-gguf:Q4_K_M
    """
    from saltus.loading import sources

    for name in names or [DEFAULT_MODEL]:
        print(sources.pull(name, offline=offline or None), flush=True)
