"""Read prompts from the command line, from stdin, from text files, and from JSON lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saltus.engine.text_files import parse_jsonl, read_stdin, read_text, typed_text

Message = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """First messages, then turns of the user; each answer is added before the next turn."""

    turns: tuple[str, ...] = ()
    messages: tuple[Message, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict, repr=False)  # the object it was read from

    @property
    def preview(self) -> str:
        """A text that represents the prompt in a list."""
        return self.turns[0] if self.turns else str(self.messages[-1].get("content", ""))


@dataclass(frozen=True)
class ConversationTurn:
    """One request: `shown_prompt` is for records, `prompt` for the engine."""

    shown_prompt: str | list[Message]
    prompt: str | list[Message]


class Conversation:
    """The turns of a prompt one after the other; `add_answer` must be called before the next turn."""

    def __init__(self, prompt: Prompt, system: str | None = None) -> None:
        self.prompt = prompt
        self.history: list[Message] = [{"role": "system", "content": typed_text(system)}] if system else []
        self.history += prompt.messages

    def turns(self) -> Iterator[ConversationTurn]:
        if not self.prompt.turns:
            yield ConversationTurn(list(self.prompt.messages), list(self.history))
        for turn in self.prompt.turns:
            bare = not self.history
            self.history.append({"role": "user", "content": turn})
            yield ConversationTurn(turn, turn if bare else list(self.history))

    def add_answer(self, text: str) -> None:
        self.history.append({"role": "assistant", "content": text})


def read_prompts(arguments: Sequence[str], file: Path | None, limit: int | None = None) -> list[Prompt]:
    """The prompts of a command line; the argument `-` reads stdin. Errors: ValueError of one line."""
    if arguments and file:
        raise ValueError("prompts are given both as words and with --prompts; give one or the other")
    if not arguments and not file:
        raise ValueError("there is no prompt; give one in quotes, a file of them with --prompts, or - for stdin")
    if arguments and limit is not None:
        raise ValueError("--limit is for the prompts of a file; leave it out, or give --prompts FILE")
    if file:
        return read_prompts_file(file)[:limit]
    prompts = [Prompt((read_stdin() if word == "-" else typed_text(word),)) for word in arguments]
    if any(not prompt.turns[0].strip() for prompt in prompts):
        raise ValueError("the prompt is empty; give a text to answer or to continue")
    return prompts


def read_prompts_file(file: Path) -> list[Prompt]:
    """The prompts of a file: JSON lines with `prompt`, `messages` or `turns`, or (.txt) a prompt a line.

    An error names the file and the line.
    """
    if str(file) == "-":
        name, text = "stdin", read_stdin()
    else:
        name, text = str(file), read_text(file)
    if file.suffix == ".txt":
        prompts = [Prompt((line.strip(),)) for line in text.split("\n") if line.strip()]
    else:
        prompts = [_parse_prompt(record, location) for location, record in parse_jsonl(text, name)]
    if not prompts:
        raise ValueError(f'{name} holds no prompts; write one JSON object a line, such as {{"prompt": "Why?"}}')
    return prompts


def _parse_prompt(record: Any, location: str) -> Prompt:
    if not isinstance(record, dict):
        raise ValueError(f'{location}: this is no JSON object; write one a line, such as {{"prompt": "Why?"}}')
    kinds = [key for key in ("prompt", "messages", "turns") if key in record]
    if len(kinds) != 1:
        given = " and ".join(kinds) if kinds else f"only {', '.join(record) or 'nothing'}"
        raise ValueError(f"{location}: it must have one of prompt, messages and turns, but has {given}")
    value = record[kinds[0]]
    if kinds == ["prompt"]:
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{location}: prompt must be a text that is not empty")
        return Prompt((value,), record=record)
    if kinds == ["turns"]:
        if (
            not isinstance(value, list)
            or not value
            or not all(isinstance(turn, str) and turn.strip() for turn in value)
        ):
            raise ValueError(f"{location}: turns must be a list of texts that are not empty")
        return Prompt(tuple(value), record=record)
    if not isinstance(value, list) or not value or not all(map(_is_message, value)):
        raise ValueError(
            f'{location}: messages must be a list of objects such as {{"role": "user", "content": "Why?"}}'
        )
    return Prompt(messages=tuple(value), record=record)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)
