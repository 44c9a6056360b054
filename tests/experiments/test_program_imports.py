"""What programs in benchmarks/, experiments/ and examples/ import from the package exists."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = [file for name in ("benchmarks", "examples", "experiments") for file in sorted((ROOT / name).rglob("*.py"))]


@pytest.mark.parametrize("file", PROGRAMS, ids=lambda file: str(file.relative_to(ROOT)))
def test_what_a_program_imports_from_saltus_exists(file):
    for part in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(part, ast.ImportFrom) and (part.module or "").partition(".")[0] == "saltus":
            try:
                exec(ast.unparse(part), {})
            except ModuleNotFoundError as error:
                if str(error.name).partition(".")[0] == "saltus":
                    raise  # others are of extras that are not installed
