"""Show the recipes of a method that `saltus train` knows."""

from __future__ import annotations

from typing import Any


def recipes_of(method: str) -> dict[str, Any]:
    """The shipped recipes of a method by name."""
    from saltus.training.objectives import OBJECTIVES
    from saltus.training.recipe import read_recipe, shipped_recipes

    read = {name: read_recipe(file) for name, file in shipped_recipes().items()}
    return {name: recipe for name, recipe in read.items() if OBJECTIVES[recipe.kind].method == method}


def list_recipes(method: str) -> None:
    """Print them as a table, and the folders of their files."""
    from saltus.cli.coloured_text import new_table, terminal
    from saltus.training.recipe import shipped_recipes

    table = new_table()
    for head in ("recipe", "trains", "takes"):
        table.add_column(head, no_wrap=head == "recipe")
    found = recipes_of(method)
    for name, recipe in found.items():
        table.add_row(name, recipe.about, recipe.time)
    if not found:
        print(f"no recipes come with {method}; give a .toml file by --recipe")
        return
    terminal(soft_wrap=False).print(table)
    files = shipped_recipes()
    for folder in sorted({files[name].parent for name in found}):
        print(f"files, to copy and change: {folder}")
