"""The answers of OpenAI's responses route: items, whole or as events. No state is kept between requests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from saltus.engine.engine import TextRequest
from saltus.engine.tool_calls import ToolCall
from saltus.server.answers import Answer, Backend
from saltus.server.errors import ApiError
from saltus.server.protocol import ResponseCall, ResponseCallOutput, ResponseContentPart, ResponsesRequest
from saltus.server.structured import Tools
from saltus.server.translation import ROLES, speculation_metrics


def response_messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The conversation of a request, as the chat template reads it."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for item in body.input:
        if isinstance(item, ResponseCall):
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            if messages and messages[-1].get("role") == "assistant":  # calls of one answer belong together
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif isinstance(item, ResponseCallOutput):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        else:
            messages.append({"role": ROLES.get(item.role, item.role), "content": _text(item.content)})
    return messages


def _text(content: str | list[ResponseContentPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class ResponseAnswer(Answer):
    """An answer with a message, calls of functions, or both."""

    prefix = "resp_"
    body: ResponsesRequest

    def __init__(
        self, backend: Backend, requests: Sequence[TextRequest], method: str, body: ResponsesRequest, tools: Tools
    ) -> None:
        super().__init__(backend, requests, method, body)
        self.tools, self.reader = tools, tools.reader()
        self.items: list[dict[str, Any]] = []  # of the output
        self.message: dict[str, Any] | None = None  # among them

    async def whole(self) -> dict[str, Any]:
        async for _ in self.arriving():
            pass
        for _ in self._add(self.choices[0].text, last=True):
            pass
        return self._response()

    async def stream(self) -> AsyncIterator[str]:
        number = 0

        def event(kind: str, fields: dict[str, Any]) -> str:
            nonlocal number
            number += 1
            data = {"type": f"response.{kind}", "sequence_number": number - 1, **fields}
            return f"event: response.{kind}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"

        started = {"response": self._response("in_progress")}
        yield event("created", started)
        yield event("in_progress", started)
        try:
            async for _, delta in self.arriving():
                for kind, fields in self._add(delta.text, last=delta.finish_reason is not None):
                    yield event(kind, fields)
        except ApiError as error:
            failed = {**self._response("failed"), "error": {"code": "server_error", "message": error.message}}
            yield event("failed", {"response": failed})
            return
        whole = self._response()
        yield event(whole["status"], {"response": whole})

    def _add(self, text: str, last: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        """Put text into the output's items; the events of that: kinds and fields."""
        content, calls = (text, []) if self.reader is None else self.reader.read(text, last)
        if content or (last and not calls and not self.items):
            yield from self._add_text(content)
        for call in calls:
            yield from self._add_call(call)
        if last and self.message is not None:
            part, place = self.message["content"][0], self._place()
            yield "output_text.done", {**place, "text": part["text"], "logprobs": []}
            yield "content_part.done", {**place, "part": part}
            self.message["status"] = "completed" if self.choices[0].finish_reason == "stop" else "incomplete"
            yield "output_item.done", {"output_index": place["output_index"], "item": self.message}

    def _add_text(self, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if self.message is None:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self.message = {
                "id": self._item_id("msg"), "type": "message", "role": "assistant", "status": "in_progress",
                "content": [part],
            }  # fmt: skip
            yield "output_item.added", {"output_index": len(self.items), "item": {**self.message, "content": []}}
            self.items.append(self.message)
            yield "content_part.added", {**self._place(), "part": dict(part)}
        if text:
            self.message["content"][0]["text"] += text
            yield "output_text.delta", {**self._place(), "delta": text, "logprobs": []}

    def _add_call(self, call: ToolCall) -> Iterator[tuple[str, dict[str, Any]]]:
        item = {
            "id": self._item_id("fc"), "type": "function_call", "call_id": self._item_id("call"), "name": call.name,
            "arguments": call.arguments, "status": "completed",
        }  # fmt: skip
        place = {"item_id": item["id"], "output_index": len(self.items)}
        self.items.append(item)
        added = {**item, "arguments": "", "status": "in_progress"}
        yield "output_item.added", {"output_index": place["output_index"], "item": added}
        yield "function_call_arguments.delta", {**place, "delta": call.arguments}
        yield "function_call_arguments.done", {**place, "name": call.name, "arguments": call.arguments}
        yield "output_item.done", {"output_index": place["output_index"], "item": item}

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{len(self.items)}{self.id.removeprefix(self.prefix)}"

    def _place(self) -> dict[str, Any]:
        """Where the message's text is."""
        assert self.message is not None
        return {"item_id": self.message["id"], "output_index": self.items.index(self.message), "content_index": 0}

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
            "store": False,
            "temperature": body.temperature,
            "text": {"format": _dumped(body.text.format) if body.text and body.text.format else {"type": "text"}},
            "tool_choice": _dumped(body.tool_choice) or "auto",
            "tools": [{"parameters": {}, "strict": True, **_dumped(tool)} for tool in body.tools or ()],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": self._usage() if finished else None,
        }
        if finished and body.include_metrics:
            response["metrics"] = {"speculative_decoding": speculation_metrics(self.calls)}
        return response

    def _usage(self) -> dict[str, Any]:
        choice = self.choices[0]
        read, written = len(choice.request.request.prompt), len(choice.tokens)
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": choice.served.cached_tokens if choice.served is not None else 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + written,
        }


def _dumped(given: BaseModel | str | None) -> Any:
    """A part of the request as it was given."""
    return given.model_dump(by_alias=True, exclude_none=True) if isinstance(given, BaseModel) else given
