"""Draw the README's picture: a text by the calls that decided it, and the closing line of the demo.

python benchmarks/picture.py docs/assets/demo.svg
"""

from __future__ import annotations

import re
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

import saltus
from saltus.cli.coloured_text import call_style, legend
from saltus.cli.demo import QUESTION
from saltus.cli.report import comparison_line
from saltus.engine.comparison import warm_up

METHOD = "lookup"
SETTINGS = {"max_new_tokens": 128}


def main(target: Path) -> None:
    engine = saltus.load(method=METHOD)
    warm_up(engine, QUESTION, (METHOD, "plain"), SETTINGS)
    stream = engine.stream(QUESTION, **SETTINGS)
    answer = Text()
    for chunk in stream:
        answer.append(chunk.text, call_style(chunk.call_index, len(chunk.tokens)))
    plain = engine.generate(QUESTION, method="plain", **SETTINGS)
    page = Console(record=True, width=96, file=StringIO(), force_terminal=True, color_system="truecolor")
    page.print(Text("$ saltus demo", "dim"), "", legend(), "", answer, "", sep="\n")
    page.print(Text(comparison_line(stream.generation, plain, METHOD), "bold"))
    drawn = page.export_svg(title="saltus")
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # the reader's own font; nothing is fetched
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(drawn.replace("Fira Code", "ui-monospace, Menlo, Consolas"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
