"""The objectives by a recipe's kind: those of every method's folder (`training/objectives.py`), and of other packages.

An entry point of the group `saltus.objectives`, named as its method, is such a table of another package.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.util import find_spec

from saltus import methods
from saltus.training.objective import Objective

ENTRY_POINTS = "saltus.objectives"


def _all_objectives() -> dict[str, Objective]:
    folders = [f"{methods.__name__}.{module.name}" for module in pkgutil.iter_modules(methods.__path__) if module.ispkg]
    trained = [folder for folder in folders if find_spec(f"{folder}.training") is not None]
    files = [f"{folder}.training.objectives" for folder in trained]
    found = [import_module(file).OBJECTIVES for file in files if find_spec(file) is not None]
    found += methods.load_entry_points(ENTRY_POINTS).values()
    return dict(sorted(pair for objectives in found for pair in objectives.items()))


OBJECTIVES = _all_objectives()
