"""The answers of OpenAI's responses route: items, whole or as events. No state is kept between requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from pydantic import BaseModel

from saltus.engine.chat.reasoning import ReasoningCounter
from saltus.engine.chat.tool_calls import ToolCall
from saltus.server.answers import Answer, Backend, Choice
from saltus.server.errors import ApiError
from saltus.server.events import KEEP_ALIVE, event_text
from saltus.server.response_tools import HostedTool, ResponseTool, tool_origins
from saltus.server.responses_request import (
    ResponseCall,
    ResponseCallOutput,
    ResponseCustomCall,
    ResponseHostedCall,
    ResponseMessage,
    ResponseReasoning,
    ResponsesRequest,
)
from saltus.server.served_request import Delta
from saltus.server.token_entries import token_entries
from saltus.server.translation import ROLES, ChatTexts, joined_text

REASONING_PLACE = {"output_index": 0, "content_index": 0}


def response_messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The conversation of a request, as the chat template reads it."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    thoughts: list[str] = []  # before the next message
    for item in body.input:
        if isinstance(item, ResponseHostedCall):
            continue
        if isinstance(item, ResponseReasoning):
            thoughts.append("".join(part.text for part in item.content or item.summary))
            continue
        message = _message(item)
        if thoughts:
            thinking = message if message["role"] == "assistant" else {"role": "assistant", "content": ""}
            thinking["reasoning_content"], thoughts = "\n".join(thoughts), []
            if thinking is not message:  # an answer that was cut off
                _add_message(messages, thinking)
        _add_message(messages, message)
    return messages


def _message(item: ResponseCall | ResponseCustomCall | ResponseCallOutput | ResponseMessage) -> dict[str, Any]:
    """A message that is an item of the input."""
    if isinstance(item, ResponseCall | ResponseCustomCall):
        call = {"id": item.call_id, "type": "function", "function": item.function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if isinstance(item, ResponseCallOutput):
        return {"role": "tool", "tool_call_id": item.call_id, "content": joined_text(item.output)}
    return {"role": ROLES.get(item.role, item.role), "content": joined_text(item.content)}


def _add_message(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Add a message to a conversation. Calls of one answer, its reasoning, and a text behind calls are one message."""
    last = messages[-1] if messages else {}
    is_one = message["role"] == last.get("role") == "assistant" and ("tool_calls" in last or not message["content"])
    if not is_one:
        messages.append(message)
        return
    if calls := [*last.get("tool_calls", ()), *message.get("tool_calls", ())]:
        last["tool_calls"] = calls
    for name in ("content", "reasoning_content"):
        if message.get(name):
            last[name] = "\n".join(text for text in (last.get(name), message[name]) if text)


class ResponseAnswer(Answer):
    """An answer with messages, calls of functions, or both."""

    prefix = "resp_"
    body: ResponsesRequest

    def __init__(self, backend: Backend, texts: ChatTexts, body: ResponsesRequest) -> None:
        super().__init__(backend, texts.requests, texts.method, body)
        prompt, reasoning = texts.requests[0].request.prompt, texts.reasoning
        self.tools = tool_origins(body.tools or ())
        self.reader, self.counter = texts.tools.reader(), ReasoningCounter(reasoning, prompt)
        self.reasoning_reader = reasoning and reasoning.reader(prompt)
        self.items: list[dict[str, Any]] = []  # of the output
        self.thought: dict[str, Any] | None = None  # the reasoning among them
        self.message: dict[str, Any] | None = None  # the one that is being written, the last of them
        self.unscored = ""  # text whose tokens have not come
        self.entries: list[dict[str, Any]] = []  # of tokens whose text has not come to a message
        self.num_scored = 0

    async def whole(self) -> dict[str, Any]:
        async for _ in self.arriving():
            pass
        for _ in self._add_with_entries(self.choices[0]):
            pass
        return self._response()

    async def stream(self) -> AsyncIterator[str]:
        number = 0

        def event(kind: str, fields: dict[str, Any]) -> str:
            nonlocal number
            number += 1
            data = {"type": f"response.{kind}", "sequence_number": number - 1, **fields}
            return event_text(data, f"response.{kind}")

        started = {"response": self._response("in_progress")}
        yield event("created", started)
        yield event("in_progress", started)
        try:
            async for _, delta in self.arriving():
                events = [event(*each) for each in self._add_with_entries(delta)]
                yield "".join(events) or KEEP_ALIVE  # a call that is being written has no events
        except ApiError as error:
            failed = {**self._response("failed"), "error": {"code": "server_error", "message": error.message}}
            yield event("failed", {"response": failed})
            return
        whole = self._response()
        yield event(whole["status"], {"response": whole})

    def _add_with_entries(self, new: Choice | Delta) -> Iterator[tuple[str, dict[str, Any]]]:
        """Put what has arrived into the output's items, token by token where their log-probabilities are asked for."""
        last = new.finish_reason is not None
        self.unscored += new.text
        if self.body.logprobs:
            num_thoughts = self._num_reasoning_tokens()
            for token, entry in zip(new.scored, token_entries(self.backend.tokenizer, new), strict=True):
                text, self.unscored = self.unscored[: len(token.text)], self.unscored[len(token.text) :]
                if token.content and self.num_scored >= num_thoughts:
                    self.entries.append(entry)
                self.num_scored += 1
                yield from self._add(text, last=False)
                if self.reader is not None and self.reader.in_call:
                    self.entries = []
        if last or not self.body.logprobs:
            text, self.unscored = self.unscored, ""
            yield from self._add(text, last)

    def _add(self, text: str, last: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        """Put text into the output's items; the events of that: kinds and fields."""
        if self.reasoning_reader is not None:
            thought, text = self.reasoning_reader.read(text, last)
            self.entries = [] if thought else self.entries
            yield from self._add_reasoning(thought, last or bool(text))
        for part in [text] if self.reader is None else self.reader.parts(text, last):
            if isinstance(part, ToolCall):
                yield from self._finish_message("completed")
                yield from self._add_call(part)
            elif part:
                yield from self._add_text(part)
        if last and all(item is self.thought for item in self.items):
            yield from self._add_text("")
        if last:
            yield from self._finish_message("completed" if self.choices[0].finish_reason == "stop" else "incomplete")

    def _add_reasoning(self, text: str, last: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        """Put reasoning into its item, which comes first; `last` completes it."""
        if text and self.body.include_reasoning:
            if self.thought is None:
                self.thought = {
                    "id": self._item_id("rs"), "type": "reasoning", "status": "in_progress", "summary": [],
                    "content": [{"type": "reasoning_text", "text": ""}],
                }  # fmt: skip
                yield "output_item.added", {"output_index": 0, "item": {**self.thought, "content": []}}
                self.items.append(self.thought)
            self.thought["content"][0]["text"] += text
            yield "reasoning_text.delta", {"item_id": self.thought["id"], **REASONING_PLACE, "delta": text}
        if last and self.thought is not None and self.thought["status"] == "in_progress":
            self.thought["status"] = "completed"
            text = self.thought["content"][0]["text"]
            yield "reasoning_text.done", {"item_id": self.thought["id"], **REASONING_PLACE, "text": text}
            yield "output_item.done", {"output_index": 0, "item": self.thought}

    def _add_text(self, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if self.message is None:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self.message = {
                "id": self._item_id("msg"), "type": "message", "role": "assistant", "status": "in_progress",
                "content": [part],
            }  # fmt: skip
            yield "output_item.added", {"output_index": len(self.items), "item": {**self.message, "content": []}}
            self.items.append(self.message)
            yield "content_part.added", {**self._place(), "part": {**part, "logprobs": []}}
        if text:
            part, entries, self.entries = self.message["content"][0], self.entries, []
            part["text"] += text
            part["logprobs"] += entries
            yield "output_text.delta", {**self._place(), "delta": text, "logprobs": entries}

    def _finish_message(self, status: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Complete the message that is being written, if there is one: a text behind calls is another one."""
        if (message := self.message) is None:
            return
        part, place = message["content"][0], self._place()
        yield "output_text.done", {**place, "text": part["text"], "logprobs": part["logprobs"]}
        yield "content_part.done", {**place, "part": part}
        message["status"], self.message = status, None
        yield "output_item.done", {"output_index": place["output_index"], "item": message}

    def _add_call(self, call: ToolCall) -> Iterator[tuple[str, dict[str, Any]]]:
        self.entries = []
        tool = self.tools[call.name]
        item = {
            "id": self._item_id("ctc" if tool.takes_text else "fc"), "call_id": self._item_id("call"),
            **tool.call_item(call.arguments), "status": "completed",
        }  # fmt: skip
        place, given = {"item_id": item["id"], "output_index": len(self.items)}, item[tool.field]
        self.items.append(item)
        added = {**item, tool.field: "", "status": "in_progress"}
        yield "output_item.added", {"output_index": place["output_index"], "item": added}
        yield f"{tool.events}.delta", {**place, "delta": given}
        yield f"{tool.events}.done", {**place, "name": tool.name, tool.field: given}
        yield "output_item.done", {"output_index": place["output_index"], "item": item}

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{len(self.items)}{self.id.removeprefix(self.prefix)}"

    def _place(self) -> dict[str, Any]:
        """Where the text of the message is, which is the last item."""
        assert self.message is not None
        return {"item_id": self.message["id"], "output_index": len(self.items) - 1, "content_index": 0}

    def _response(self, status: str | None = None) -> dict[str, Any]:
        """The response as far as it has arrived; without a status it is finished."""
        choice, body = self.choices[0], self.body
        finished = status is None
        status = status or ("completed" if choice.finish_reason == "stop" else "incomplete")
        response: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.backend.name,
            "output": self.items if finished else [],
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": _dumped(body.text.format) if body.text and body.text.format else {"type": "text"}},
            "tool_choice": _dumped(body.tool_choice) or "auto",
            "tools": [_described(tool) for tool in body.tools or () if not isinstance(tool, HostedTool)],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": self._usage() if finished else None,
        }
        return response | (self.metrics(self.calls) if finished else {})

    def _num_reasoning_tokens(self) -> int:
        """How many tokens are reasoning by now."""
        return self.counter.count(self.choices[0].tokens)

    def _usage(self) -> dict[str, Any]:
        choice = self.choices[0]
        read, written = len(choice.prompt), len(choice.tokens)
        return {
            "input_tokens": read,
            "input_tokens_details": {
                "cached_tokens": choice.served.cached_tokens if choice.served is not None else 0,
                "cache_write_tokens": 0,
            },
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens()},
            "total_tokens": read + written,
        }


def _dumped(given: BaseModel | str | None) -> Any:
    """A part of the request as it was given."""
    return given.model_dump(by_alias=True, exclude_none=True) if isinstance(given, BaseModel) else given


def _described(tool: BaseModel) -> dict[str, Any]:
    """A tool as it was given, and what a function has by default."""
    return {**({"parameters": {}, "strict": True} if isinstance(tool, ResponseTool) else {}), **_dumped(tool)}
