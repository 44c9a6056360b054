"""Separate the messages that gpt-oss writes to its channels: reasoning, the answer, and calls of tools.

    <|channel|>analysis<|message|>A cat.<|end|><|start|>assistant<|channel|>final<|message|>It is a cat.

A message with a recipient is a call (`commentary to=functions.look`); the recipient may stand before the channel, too.
Commentary without one is shown to the user before a call.
"""

from __future__ import annotations

import re

from saltus.engine.chat.tool_formats.gpt_oss import CALL_END, GPT_OSS, MESSAGE
from saltus.engine.chat.tool_formats.tool_format import overlap

START, CHANNEL, RECIPIENT = "<|start|>", "<|channel|>", " to="
ENDS = ("<|end|>", CALL_END, "<|return|>", START)
MAX_HEAD = 512  # characters before `<|message|>`; a longer text is none


class ChannelReader:
    """Separates reasoning and answer as a text arrives. Calls stay in the answer, in the form of `GPT_OSS`."""

    def __init__(self, inside: bool) -> None:
        self.buffer, self.place = "", "reasoning" if inside else "head"  # or "answer" or "call"
        self.is_fresh = True  # nothing but space of the message has come
        self.begun: set[str] = set()  # of reasoning and answer, those that have a text

    def read(self, text: str, last: bool = False) -> tuple[str, str]:
        """The next text of the reasoning and of the answer. `last` releases what was held back."""
        self.buffer += text
        parts = {"reasoning": "", "answer": ""}
        while self.buffer:
            if self.place == "head":
                if (head := self._next_head(last)) is None:
                    break
                parts["answer"] += head
                continue
            end, marker = min(
                ((at, marker) for marker in ENDS if (at := self.buffer.find(marker)) >= 0), default=(-1, "")
            )
            body = self.buffer[:end] if end >= 0 else self._certain(last)
            kind = "reasoning" if self.place == "reasoning" else "answer"
            parts[kind] += self._shown(body.rstrip() if end >= 0 and self.place != "call" else body)
            self.buffer = self.buffer[len(body) :]
            if end < 0:
                self.buffer = "" if last else self.buffer
                break
            parts["answer"] += CALL_END if self.place == "call" else ""
            self.buffer = self.buffer.removeprefix("" if marker == START else marker)
            self.place, self.is_fresh = "head", True
        return parts["reasoning"], parts["answer"]

    def _next_head(self, last: bool) -> str | None:
        """Read the head of the next message: what the answer has of it. None if more of it has to arrive."""
        begun = self.buffer.lstrip("\n")
        head, message, rest = begun.partition(MESSAGE)
        is_head = head.startswith((START, CHANNEL, RECIPIENT)) and len(head) < MAX_HEAD
        if not is_head:
            if not last and any(begin.startswith(begun) for begin in (START, CHANNEL, RECIPIENT)):
                return None
            self.place, self.is_fresh = "answer", bool(self.begun)
            return ""
        if not message:
            self.buffer = "" if last else self.buffer
            return None
        self.buffer = rest
        recipient, channel = re.search(r" to=([^\s<]+)", head), re.search(r"<\|channel\|>\s*(\w+)", head)
        if recipient is not None and f"to={recipient[1]}".startswith(GPT_OSS.recipient):
            self.place = "call"
            return GPT_OSS.begin + recipient[1].removeprefix("functions.") + MESSAGE
        is_thought = recipient is not None or (channel is not None and channel[1] == "analysis")
        self.place = "reasoning" if is_thought else "answer"
        return ""

    def _certain(self, last: bool) -> str:
        """The text of the message up to what may be the space before its end, or the beginning of that."""
        if last:
            return self.buffer.rstrip() if self.place == "reasoning" else self.buffer
        held = max(overlap(self.buffer, marker) for marker in ENDS)
        text = self.buffer[: len(self.buffer) - held]
        return text if self.place == "call" else text.rstrip()

    def _shown(self, text: str) -> str:
        """A text of a message, on a line of its own if there are messages of its kind before it."""
        if self.place == "call":
            return text
        text = text.lstrip() if self.is_fresh else text
        between = "\n" if text and self.is_fresh and self.place in self.begun else ""
        if text:
            self.is_fresh = False
            self.begun.add(self.place)
        return between + text
