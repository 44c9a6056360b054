"""The answers of Anthropic's Messages API: content blocks, whole or as events."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

from saltus.engine.chat.reasoning import ReasoningCounter
from saltus.engine.chat.tool_calls import ToolCall
from saltus.engine.chat.tool_formats.json_calls import refuse_constant
from saltus.engine.chat.tool_messages import finite
from saltus.server.answers import Answer, Backend, Choice
from saltus.server.errors import ApiError
from saltus.server.events import event_text, with_pauses
from saltus.server.message_blocks import signature_of
from saltus.server.protocol import ChatCompletionRequest
from saltus.server.served_request import Delta
from saltus.server.translation import ChatTexts

PING_SECONDS = 10.0  # without an event, as while a long prompt is read: clients take silence for a broken connection
PING = event_text({"type": "ping"}, "ping")
LONGEST_INTEGER = 4300  # digits that Python reads
EMPTY = {
    "text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}, "tool_use": {"input": {}},
}  # fmt: skip
"""Blocks without what their deltas bring."""


class MessageAnswer(Answer):
    """An answer with reasoning, texts and calls of tools, to a chat completion that stands for the request."""

    prefix = "msg_"
    body: ChatCompletionRequest

    def __init__(
        self,
        backend: Backend,
        texts: ChatTexts,
        body: ChatCompletionRequest,
        omits_thinking: bool = False,
        only_reads: bool = False,
    ) -> None:
        super().__init__(backend, texts.requests, texts.method, body)
        prompt, reasoning = texts.requests[0].request.prompt, texts.reasoning
        self.output = texts.requests[0].output
        self.reader = texts.tools.reader()
        self.counter = reasoning and ReasoningCounter(reasoning, prompt)
        self.reasoning_reader = reasoning and reasoning.reader(prompt)
        self.content: list[dict[str, Any]] = []
        self.is_open = False  # the last block is being written
        self.omits_thinking, self.thought = omits_thinking, ""
        self.only_reads = only_reads  # the prompt; nothing is written

    async def whole(self) -> dict[str, Any]:
        async for _ in self.arriving():
            pass
        if self.only_reads:
            self.choices[0].tokens, self.choices[0].finish_reason = [], "length"
        else:
            for _ in self._add(self.choices[0]):
                pass
        return self._message() | self.metrics(self.calls)

    async def stream(self) -> AsyncIterator[str]:
        def event(kind: str, fields: dict[str, Any]) -> str:
            return event_text({"type": kind, **fields}, kind)

        yield event("message_start", {"message": self._message()}) + PING
        try:
            async with aclosing(with_pauses(self.arriving(), PING_SECONDS)) as arriving:
                async for arrived in arriving:
                    events = [] if arrived is None else [event(*each) for each in self._add(arrived[1])]
                    yield "".join(events) or PING  # a call that is being written has no events
        except ApiError as error:
            yield event_text(error.anthropic_body(), "error")
            return
        ended = {"delta": self._stop(), "usage": self._usage(), **self.metrics(self.calls)}
        yield event("message_delta", ended) + event("message_stop", {})

    def _add(self, new: Choice | Delta) -> Iterator[tuple[str, dict[str, Any]]]:
        """Put what has arrived into blocks; the events of that: kinds and fields."""
        text, last = new.text, new.finish_reason is not None
        if self.reasoning_reader is not None:
            thought, text = self.reasoning_reader.read(text, last)
            if thought and self.body.include_reasoning:
                yield from self._extend("thinking", thought)
        for part in [text] if self.reader is None else self.reader.parts(text, last):
            if isinstance(part, ToolCall):
                yield from self._add_call(part)
            elif part:
                yield from self._extend("text", part)
        if last and not self.content:
            yield from self._begin("text")  # clients look for a text in the first block
        if last:
            yield from self._end()

    def _extend(self, kind: str, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Add to the block that is being written, or to a new one if that is of another kind."""
        if not self.is_open or self.content[-1]["type"] != kind:
            yield from self._end()
            yield from self._begin(kind)
        if kind == "thinking" and self.omits_thinking:
            self.thought += text
            return
        self.content[-1][kind] += text
        yield self._delta(f"{kind}_delta", kind, text)

    def _add_call(self, call: ToolCall) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from self._end()
        yield from self._begin("tool_use", id=f"toolu_{uuid.uuid4().hex[:24]}", name=call.name)
        self.content[-1]["input"] = _read_arguments(call.arguments)
        yield self._delta("input_json_delta", "partial_json", call.arguments)
        yield from self._end()

    def _begin(self, kind: str, **fields: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        block = {"type": kind, **fields, **EMPTY[kind]}
        yield "content_block_start", {"index": len(self.content), "content_block": block}
        self.content.append(dict(block))
        self.is_open = True

    def _end(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Complete the block that is being written, if there is one."""
        if not self.is_open:
            return
        if self.content[-1]["type"] == "thinking":
            self.content[-1]["signature"] = signature = signature_of(self.thought) if self.omits_thinking else ""
            yield self._delta("signature_delta", "signature", signature)
        self.is_open = False
        yield "content_block_stop", {"index": len(self.content) - 1}

    def _delta(self, kind: str, name: str, value: str) -> tuple[str, dict[str, Any]]:
        """The event that adds to the last block."""
        return "content_block_delta", {"index": len(self.content) - 1, "delta": {"type": kind, name: value}}

    def _message(self) -> dict[str, Any]:
        """The message as far as it has arrived."""
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self.backend.name,
            "content": self.content, **self._stop(), "usage": self._usage(),
        }  # fmt: skip

    def _stop(self) -> dict[str, Any]:
        """Why the text has ended; calls come before a stop sequence behind them, since the client is to run them."""
        reason, finish, sequence = None, self.choices[0].finish_reason, None
        if finish == "length":
            reason = "max_tokens"
        elif finish is not None and any(block["type"] == "tool_use" for block in self.content):
            reason = "tool_use"
        elif finish is not None:
            sequence = self.output.stop_string
            reason = "end_turn" if sequence is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> dict[str, Any]:
        """Token counts up to now. Input tokens do not count those that the prefix cache had."""
        choice = self.choices[0]
        cached = choice.served.cached_tokens if choice.served is not None else 0
        usage: dict[str, Any] = {
            "input_tokens": len(choice.prompt) - cached, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached, "output_tokens": len(choice.tokens),
        }  # fmt: skip
        if self.counter is not None:
            usage["output_tokens_details"] = {"thinking_tokens": self.counter.count(choice.tokens)}
        return usage


def _read_arguments(written: str) -> dict[str, Any]:
    """The arguments of a call as an object, which can be written as JSON in UTF-8 again."""
    try:
        given = json.loads(written, parse_float=finite, parse_int=_integer, parse_constant=refuse_constant)
    except (ValueError, RecursionError):  # the calls of all forms are objects, but may be nested too deeply for Python
        return {}
    return json.loads(json.dumps(given, ensure_ascii=False).encode(errors="replace"))


def _integer(written: str) -> int | float:
    return int(written) if len(written) <= LONGEST_INTEGER else finite(written)
