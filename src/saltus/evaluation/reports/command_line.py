"""Name the command that made a result, as it can be given again."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def command_line() -> str:
    """This process's command. `python -m saltus` begins with a file of the package, which is named `saltus`."""
    program = Path(sys.argv[0]).name
    return shlex.join(["saltus" if program == "__main__.py" else program, *sys.argv[1:]])
