"""End a text by its lines, as editors ask for it: at a line that is indented less, or when its time is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from saltus.engine.detokenizer import TextOutput

BLANKS = " \t"


@dataclass
class LineLimits:
    """Ends a text where `min_indent` or `seconds` say so; what remains is the beginning of the text without them.

    Its `add` takes the place of the output's.
    """

    output: TextOutput
    min_indent: int = 0  # spaces and tabs that lines after the first begin with; before another line the text ends
    seconds: float = 0.0  # since the first token; the first line break after them ends the text; 0: never
    clock: Callable[[], float] = time.monotonic
    ended: bool = field(default=False, init=False)  # by a limit
    deadline: float | None = field(default=None, init=False)
    indent: int | None = field(default=None, init=False)  # of a line so far; None: the first, or long enough

    def add(self, token: int) -> bool:
        """Take the next token; True if the text ends with it."""
        if self.deadline is None:
            self.deadline = self.clock() + self.seconds
        before = len(self.output.text)
        ends = self.output.add(token)
        if self.min_indent:
            self._check_indent(before)
        has_ended = "\n" in self.output.text[before:] and self.seconds > 0 and self.deadline < self.clock()
        if not ends and has_ended:
            self.ended = self.output.ended = True
        return ends or self.output.ended

    def _check_indent(self, begin: int) -> None:
        """Cut the text before a line that is indented too little, at its first character that is no blank."""
        for place in range(begin, len(self.output.text)):
            character = self.output.text[place]
            if self.indent is not None and character not in BLANKS:
                self.output.text, self.output.stop_string = self.output.text[:place], None
                self.ended = self.output.ended = True
                return
            if character == "\n":
                self.indent = 0
            elif self.indent is not None:
                self.indent = self.indent + 1 if self.indent + 1 < self.min_indent else None
