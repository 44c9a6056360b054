"""Write streamed text to a terminal, coloured by call and broken between words, or to a pipe."""

from __future__ import annotations

import errno
import re
import sys
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.style import Style
from rich.table import Table
from rich.text import Text

CALL_COLOURS = ("cyan", "yellow", "magenta", "green", "bright_blue")  # neighbours are distinct, also for most
PIECE_PATTERN = re.compile(r"\n|[^\S\n]+|\S+")
VISIBLE_CONTROL_CHARACTERS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
VISIBLE_CONTROL_CHARACTERS |= dict.fromkeys(range(128, 160), "�")  # text must not control the terminal


def call_style(call_index: int, tokens: int) -> Style:
    """The colour of a call; bold where it decided several tokens at once."""
    return Style(color=CALL_COLOURS[call_index % len(CALL_COLOURS)], bold=tokens > 1)


def legend() -> Text:
    """An explanation of the colours."""
    explained = Text()
    words = (("every ", 1), ("colour ", 1), ("is ", 1), ("one call of the network, ", 4), ("bold ", 1))
    words += (("if it decided several tokens at once", 6),)
    for call, (word, tokens) in enumerate(words):
        explained.append(word, call_style(call, tokens))
    return explained


class PipeSafeConsole(Console):
    """A console that raises BrokenPipeError; Rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, "whoever read this has left")


def terminal(stderr: bool = False, colour: bool | None = None, soft_wrap: bool = True) -> Console:
    """A console for stdout or stderr; `colour` overrides the stream and the environment."""
    forced: dict[str, Any] = {}
    if colour is not None:
        forced["no_color"] = not colour
    if colour:
        stream = sys.stderr if stderr else sys.stdout
        forced |= {"force_terminal": True, "color_system": "auto" if stream.isatty() else "standard"}
    return PipeSafeConsole(stderr=stderr, highlight=False, soft_wrap=soft_wrap, **forced)


def new_table(**settings: Any) -> Table:
    """A table with a line below its head and no other."""
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, **settings)


def line_width(console: Console) -> int | None:
    """Where lines of an answer are broken between words: before a terminal's last column; None: nowhere."""
    return console.width - 1 if console.is_terminal and not console.is_dumb_terminal else None


@dataclass
class ColouredTextWriter:
    """Writes text piece by piece. `wrap` is the width at which lines are broken; None: never."""

    console: Console
    coloured: bool
    wrap: int | None = None
    column: int = 0
    current_word: list[tuple[str, Style | None]] = field(default_factory=list)  # since the last place to break

    def write(self, text: str, call_index: int, tokens: int) -> None:
        """Add the text that a call decided; it is shown at once."""
        style = call_style(call_index, tokens) if self.coloured else None
        if self.console.is_terminal:
            text = text.translate(VISIBLE_CONTROL_CHARACTERS).expandtabs(4)
        if self.wrap is None:
            # before it is printed: Ctrl-C may come in between, and the line is then still ended
            self.column = int(not text.endswith("\n")) if text else self.column
            self._print(text, style)
        else:
            for piece in PIECE_PATTERN.findall(text):
                self._write_wrapped(piece, style, self.wrap)
        self.console.file.flush()

    def finish_line(self) -> None:
        """End the current line, if there is one."""
        if self.column:
            self._print("\n", None)
            self.console.file.flush()
            self.column, self.current_word = 0, []

    def _write_wrapped(self, piece: str, style: Style | None, width: int) -> None:
        cells = cell_len(piece)
        if piece == "\n":
            self.column, self.current_word = 0, []
        elif piece.isspace():
            self.current_word = []
            self.column += cells
            if self.column > width:  # the line is full
                return
        else:
            begun = sum(cell_len(part) for part, _ in self.current_word)
            if self.column + cells > width and self.column > begun:
                self._move_word_to_next_line(begun)
            self.current_word.append((piece, style))
            self.column = (self.column + cells) % (width + 1) or 1  # a word longer than a line
        self._print(piece, style)

    def _move_word_to_next_line(self, word_width: int) -> None:
        """Move the current word to the next line."""
        if word_width:
            self.console.control(Control.move(-word_width, 0), Control((ControlType.ERASE_IN_LINE, 0)))
        self._print("\n", None)
        for part, style in self.current_word:
            self._print(part, style)
        self.column = word_width

    def _print(self, text: str, style: Style | None) -> None:
        if style and self.console.is_terminal:
            self.console.print(Text(text, style), end="")
        else:
            self.console.file.write(text)
