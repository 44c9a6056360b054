"""One file for each `quant_method` of a config.json: it says what the tensors of a quantised weight are.

A file has `PARTS`, the names of these tensors (the last part of each), each with the name of the weight in the model,
and `read(settings, name, parts)`: the numbers of the weight called `name`, of its tensors by their names.
`settings` are the `quantization_config`. What it does not read it refuses by a ValueError that says what it is.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


@lru_cache
def find_method(quant_method: str) -> ModuleType | None:
    """The file of a method, None if there is none."""
    name = quant_method.replace("-", "_")
    is_name = name.isidentifier() and name.isascii()
    return import_module(f"{__name__}.{name}") if is_name and find_spec(f"{__name__}.{name}") is not None else None
