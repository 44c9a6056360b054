"""Turn tokens into text as they are decided: never half a character, never what may become a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

LOST = "\N{REPLACEMENT CHARACTER}"  # how tokenizers show a character that is not whole
CONTEXT = 8  # tokens of the prompt that say how a continuation joins it
PATIENCE = 64  # tokens that are waited for until broken bytes are taken for what they are


class Detokenizer:
    """Decode token by token; what was said never changes.

    Only a short window is decoded each time: the tokens of the last complete piece, for the spaces between words,
    and those since.
    """

    def __init__(self, tokenizer: Any, context: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.before = list(context[-CONTEXT:])
        self.since: list[int] = []
        self.start = self.said = self._decode(self.before)

    def read(self, token: int) -> str:
        """The text that this token completes; empty while a character is not whole, and for special tokens."""
        self.since.append(token)
        text = self._decode(self.before + self.since)
        whole = text if len(self.since) > PATIENCE else text.rstrip(LOST)
        if len(whole) < len(text) and not (whole.startswith(self.said) and len(whole) > len(self.said)):
            return ""
        if whole.startswith(self.said):
            new = whole[len(self.said) :]
        else:  # broken bytes changed how the tokens before them read
            new = self._decode(self.since)[len(self.said) - len(self.start) :]
        self.said = whole
        if new and whole == text:
            self.before, self.since = self.since, []
            self.start = self.said = self._decode(self.before)
        return new

    def _decode(self, tokens: list[int]) -> str:
        if not tokens:
            return ""
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@dataclass
class Script:
    """The text of one continuation so far, and whether it has ended."""

    detokenizer: Detokenizer
    ends: frozenset[int]  # tokens that end it
    stops: tuple[str, ...] = ()  # strings that end it, and are cut off
    text: str = ""
    ended: bool = False
    shown: int = field(default=0, init=False)  # characters given out by `release`

    def read(self, token: int) -> bool:
        """Take the next token; True if the text ends with it."""
        assert not self.ended
        new = self.detokenizer.read(token)
        self.text += new
        self.ended = token in self.ends
        if new and self.stops:
            begin = max(len(self.text) - len(new) - max(map(len, self.stops)) + 1, 0)
            found = [at for stop in self.stops if (at := self.text.find(stop, begin)) >= 0]
            if found:
                self.text, self.ended = self.text[: min(found)], True
        return self.ended

    def release(self, final: bool = False) -> str:
        """What may be shown now and was not yet: all but a tail that may begin a stop string."""
        held = 0 if final or self.ended else _may_begin(self.text, self.stops)
        new = self.text[self.shown : len(self.text) - held]
        self.shown += len(new)
        return new


def _may_begin(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of the text that is the beginning of a stop string."""
    longest = min(max(map(len, stops), default=1) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in stops)), 0)


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Checked: a stop string is not empty."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if "" in stops:
        raise ValueError("a stop string is empty and would end every text at once; remove it")
    return stops
