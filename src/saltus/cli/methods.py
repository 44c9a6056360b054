"""The methods command: methods and options, from their configs and docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Annotated, Any

import typer

from saltus.cli.options import OUTPUT_PANEL, in_panel

AUTO_IS = (
    "The default: what drafts best with a model without any settings. A draft model (--draft-model), a drafter given by"
    " ptp.model or mtp.model, a checkpoint's own heads, or the shipped drafter where it pays on this machine, each with"
    " lookup; assd for a model that fills holes; else lookup."
)


def methods(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Methods whose options are shown.")] = None,
    json: Annotated[bool, in_panel(OUTPUT_PANEL, "--json", help="Print a JSON object a method.")] = False,
) -> None:
    """List the methods, or the options of some of them.

    [bold]Examples[/bold]

        saltus methods

        saltus methods lookup jacobi

        saltus generate --method jacobi+lookup --option lookup.max_ngram_size=5 "Who?"

    Without a name all methods are listed.
    """
    from saltus.cli.report import print_json
    from saltus.methods import available_methods, make_methods

    for name in names or ():
        make_methods(name)  # refuses what is none
    wanted = {part for name in names or () for part in name.split("+")}
    chosen = {name: config for name, config in available_methods().items() if not wanted or name in wanted}
    described = [describe_method(name, config) for name, config in chosen.items()]
    if "auto" in wanted:
        described.insert(0, {"method": "auto", "about": AUTO_IS, "options": []})
    if json:
        for each in described:
            print_json(each)
    else:
        _show(described, with_options=bool(names))


def describe_method(name: str, config: type[Any]) -> dict[str, Any]:
    """A method's name, the first sentence of its docstring, and its options with type, default and comment."""
    summary = " ".join((inspect.getdoc(config) or "").split("\n\n")[0].split())
    comments = _field_comments(config)
    options = [
        {
            "name": each.name,
            "type": each.type if isinstance(each.type, str) else getattr(each.type, "__name__", str(each.type)),
            "default": _default(each),
            "about": comments.get(each.name, ""),
        }
        for each in dataclasses.fields(config)
        if each.init
    ]
    return {"method": name, "about": summary, "options": options}


def _default(option: Any) -> Any:
    if option.default_factory is not dataclasses.MISSING:
        return option.default_factory()
    return None if option.default is dataclasses.MISSING else option.default


def _field_comments(config: type[Any]) -> dict[str, str]:
    """The comments after fields in the source, such as `max_ngram_size: int = 4  # tokens of the n-gram`."""
    try:
        source = inspect.getsource(config)
    except (OSError, TypeError):
        return {}
    return dict(re.findall(r"^    (\w+): [^#\n]*#\s*(.+?)\s*$", source, flags=re.MULTILINE))


def _show(descriptions: list[dict[str, Any]], with_options: bool) -> None:
    from rich.text import Text

    from saltus.cli.coloured_text import new_table, terminal

    table = new_table(padding=(0, 2, 1, 0))
    table.add_column("method", style="bold cyan", no_wrap=True)
    table.add_column("what it does", ratio=2)
    if with_options:
        table.add_column("options", ratio=3)
    else:
        table.add_row("auto", Text(AUTO_IS))
    for each in descriptions:
        if not with_options:
            table.add_row(each["method"], Text(each["about"]))
            continue
        options = Text()
        for option in each["options"]:
            options.append("\n" if options else "")
            options.append(f"{option['name']}={option['default']}", "cyan")
            options.append(f"  {option['about']}" if option["about"] else "", "dim")
        table.add_row(each["method"], Text(each["about"]), options or Text("none", "dim"))
    console = terminal(soft_wrap=False)
    console.print(table)
    console.print(Text("Join methods with +: their draft tokens share one tree, as in --method jacobi+lookup.", "dim"))
    if not with_options:
        console.print(Text("saltus methods NAME shows the options of a method, for --option NAME.FIELD=VALUE.", "dim"))
