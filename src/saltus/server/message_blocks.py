"""The messages of Anthropic's API, made of blocks, and those of a chat completion that they stand for."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from saltus.server.fields import Fields, Items, JsonObject
from saltus.server.protocol import MAX_ITEMS

# What Claude Code puts before its system prompt: a line that differs in each request, so that no prefix is the same.
BILLING_LINE = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n*")
SIGNATURE_BEGIN = "saltus:"


class MessagesFields(Fields):
    """A JSON object of Anthropic's API. Fields that are not known are ignored: agents send new ones in each version."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


def _blocks_of(*kinds: str) -> Callable[[Any], Any]:
    """Refuses blocks of other types with one line."""

    def read(given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            raise ValueError(
                f"there is a block of the type {kind!r}, but only {', '.join(kinds)} can be read here; leave it out"
            )
        return given

    return read


class TextBlock(MessagesFields):
    """A piece of a text."""

    type: Literal["text"] = "text"
    text: str


class ThinkingBlock(MessagesFields):
    """The reasoning before an earlier answer; its signature has it where it was to be omitted."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""

    @property
    def text(self) -> str:
        """The reasoning."""
        return self.thinking or (read_signature(self.signature) or "")


class RedactedThinkingBlock(MessagesFields):
    """Reasoning of another server that nobody can read."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(MessagesFields):
    """An earlier call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject


OnlyText = Annotated[TextBlock, BeforeValidator(_blocks_of("text"))]
Texts = str | Annotated[Items[OnlyText], Field(max_length=MAX_ITEMS)]


class ToolResultBlock(MessagesFields):
    """What a call has returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = ""
    is_error: bool = False


AssistantBlock = Annotated[
    Annotated[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")],
    BeforeValidator(_blocks_of("text", "thinking", "redacted_thinking", "tool_use")),
]
UserBlock = Annotated[
    Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")],
    BeforeValidator(_blocks_of("text", "tool_result")),
]


class UserMessage(MessagesFields):
    """What the user writes, and what tools have returned."""

    role: Literal["user"]
    content: str | Items[UserBlock]


class AssistantMessage(MessagesFields):
    """An earlier answer, or the beginning of the one to write."""

    role: Literal["assistant"]
    content: str | Items[AssistantBlock]


class SystemMessage(MessagesFields):
    """Instructions, in the midst of a conversation."""

    role: Literal["system"] = "system"
    content: Texts


AnyMessage = UserMessage | AssistantMessage | SystemMessage


def conversation_of(system: str | Sequence[TextBlock], messages: Sequence[AnyMessage]) -> list[dict[str, Any]]:
    """The messages as chat completions have them; those of one role that follow on each other are one."""
    texts = [block.text for block in _blocks(system)]
    texts = [BILLING_LINE.sub("", text, 1) if BILLING_LINE.match(text) else text for text in texts]
    first = [SystemMessage(content=text) for text in texts if text]
    made: list[dict[str, Any]] = []
    for role, group in groupby([*first, *messages], key=lambda message: message.role):
        blocks = [block for message in group for block in _blocks(message.content)]
        made += [_answer(blocks)] if role == "assistant" else _texts_and_results(role, blocks)
    return made


def signature_of(thought: str) -> str:
    """A signature that holds reasoning which the client does not show, so that it comes back in the next turn."""
    return SIGNATURE_BEGIN + base64.b64encode(thought.encode(errors="replace")).decode()


def read_signature(signature: str) -> str | None:
    """The reasoning that a signature holds; None for those of other servers."""
    try:
        written = base64.b64decode(signature.removeprefix(SIGNATURE_BEGIN), validate=True).decode()
    except ValueError:
        return None
    return written if signature.startswith(SIGNATURE_BEGIN) else None


def _blocks(content: str | Sequence[Any]) -> Sequence[Any]:
    return [TextBlock(text=content)] if isinstance(content, str) else content


def _text_of(blocks: Sequence[Any]) -> str:
    """The text of blocks, which are lines of their own, as the parts of messages in chat completions."""
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))


def _answer(blocks: Sequence[Any]) -> dict[str, Any]:
    """An answer as one message."""
    made: dict[str, Any] = {"role": "assistant", "content": _text_of(blocks)}
    if thoughts := [block.text for block in blocks if isinstance(block, ThinkingBlock) and block.text]:
        made["reasoning_content"] = "\n".join(thoughts)
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    if calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
    return made


def _texts_and_results(role: str, blocks: Sequence[Any]) -> list[dict[str, Any]]:
    """The texts and the results of tools in their order: texts that follow on each other are one message."""
    made: list[dict[str, Any]] = []
    for is_text, group in groupby(blocks, key=lambda block: isinstance(block, TextBlock)):
        if is_text:
            made.append({"role": role, "content": _text_of([*group])})
            continue
        made += ({"role": "tool", "tool_call_id": one.tool_use_id, "content": _result(one)} for one in group)
    return made or [{"role": role, "content": ""}]


def _result(block: ToolResultBlock) -> str:
    """What a call has returned, and whether that is an error, which chat templates have no place for."""
    return ("Error: " if block.is_error else "") + _text_of(_blocks(block.content))
