"""The export command."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from saltus.cli import options as o


def export(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A DFlash drafter that saltus train ptp wrote.")],
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="speculators (vLLM), or flat (SGLang, vLLM).")],
    out: Annotated[Path, o.in_panel(o.OUTPUT_PANEL, "--out", metavar="DIR", help="The result.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", metavar="MODEL", help="Its target. [dim]\\[default: the one that it was trained for][/dim]"
        ),
    ] = None,
    verifier: Annotated[
        str | None,
        typer.Option(
            "--verifier", metavar="NAME", help="The target's name for vLLM. [dim]\\[default: that of --model][/dim]"
        ),
    ] = None,
) -> None:
    """Write a trained drafter in a format that other engines load.

    The format [bold]speculators[/bold] is what vLLM reads; its vocabulary may be cut.
    The format [bold]flat[/bold] is that of the authors of DFlash, which SGLang reads; it has
    the target's whole vocabulary (vocabulary=0 in training).

    [bold]Examples[/bold]

        saltus export drafter --to speculators --out dflash

        saltus export drafter --to flat --out dflash --model qwen3-0.6b --verifier Qwen/Qwen3-0.6B

    FOLDER is what [bold]saltus train ptp[/bold] wrote by the recipe smollm2-dflash.
    """
    from saltus.cli.answers import print_note
    from saltus.cli.open_engine import open_engine
    from saltus.loading.metadata import find_metadata, read_metadata
    from saltus.methods.published.dflash_export import FORMATS, check_free, save_dflash
    from saltus.methods.published.dflash_files import load_dflash
    from saltus.methods.published.dflash_model import DFLASH
    from saltus.storage.cache_files import full_disk_errors
    from saltus.storage.permissions import reset_permissions
    from saltus.training.objective import decoding_commands

    if to not in FORMATS:
        raise ValueError(f"--to {to}: there are {', '.join(FORMATS)}")
    metadata = find_metadata(folder) or read_metadata(folder, "drafter")  # the latter raises the error
    if metadata.kind != "drafter" or metadata.settings.get("network") != DFLASH:
        raise ValueError(
            f"{folder} holds a network of Saltus alone (kind {metadata.kind}), which no other engine loads; train one"
            " that others load with saltus train ptp --recipe smollm2-dflash"
        )
    check_free(out)  # before a model is loaded
    name = model or metadata.target_name
    target: Any = open_engine(name, "plain", device="cpu", weights="bf16").network.model
    drafter = load_dflash(folder, target, name)
    with full_disk_errors(out):
        save_dflash(drafter, next(each for each in FORMATS if each == to), out, target, verifier or name)
        reset_permissions(out)
    left = "; its correction stays behind, and others draft without it" if drafter.correction is not None else ""
    print_note(f"written: {out}{left}")
    for command in decoding_commands(quote(name), "ptp", f" --option ptp.model={quote(str(out))}"):
        print_note(f"  {command}")
