"""The answers of OpenAI's responses route: items, whole or as events. No state is kept between requests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from saltus.serving.answers import Answer
from saltus.serving.errors import ApiError
from saltus.serving.protocol import ResponsesRequest
from saltus.serving.translation import speculation_metrics

ROLES = {"developer": "system"}  # as chat templates name them


def response_messages(asked: ResponsesRequest) -> list[dict[str, Any]]:
    """The conversation of a request, as the chat template reads it."""
    messages = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    if isinstance(asked.input, str):
        return [*messages, {"role": "user", "content": asked.input}]
    for message in asked.input:
        content = message.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        messages.append({"role": ROLES.get(message.role, message.role), "content": text})
    return messages


class ResponseAnswer(Answer):
    """An answer with one message."""

    prefix = "resp_"
    asked: ResponsesRequest

    async def whole(self) -> dict[str, Any]:
        async for _ in self.arriving():
            pass
        return self._response()

    async def stream(self) -> AsyncIterator[str]:
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        number = 0

        def event(kind: str, **fields: Any) -> str:
            nonlocal number
            number += 1
            data = {"type": kind, "sequence_number": number - 1, **fields}
            return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"

        started = self._response("in_progress")
        yield event("response.created", response=started)
        yield event("response.in_progress", response=started)
        yield event("response.output_item.added", output_index=0, item=self._message("in_progress", []))
        yield event("response.content_part.added", **place, part=self._part(""))
        try:
            async for _, part in self.arriving():
                if part.text:
                    yield event("response.output_text.delta", **place, delta=part.text, logprobs=[])
        except ApiError as error:
            failed = {**self._response("failed"), "error": {"code": "server_error", "message": error.message}}
            yield event("response.failed", response=failed)
            return
        text = self.choices[0].text
        yield event("response.output_text.done", **place, text=text, logprobs=[])
        yield event("response.content_part.done", **place, part=self._part(text))
        whole = self._response()
        yield event("response.output_item.done", output_index=0, item=whole["output"][0])
        yield event(f"response.{whole['status']}", response=whole)

    @property
    def _item_id(self) -> str:
        return "msg_" + self.id.removeprefix(self.prefix)

    @staticmethod
    def _part(text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, status: str | None = None) -> dict[str, Any]:
        """The response as far as it has arrived; without a status it is finished."""
        choice, asked = self.choices[0], self.asked
        finished = status is None
        status = status or ("completed" if choice.finish_reason == "stop" else "incomplete")
        response: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.backend.name,
            "output": [self._message(status, [self._part(choice.text)])] if finished else [],
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": [],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": self._usage() if finished else None,
        }
        if finished and asked.include_metrics:
            response["metrics"] = {"speculative_decoding": speculation_metrics(self.calls)}
        return response

    def _usage(self) -> dict[str, Any]:
        choice = self.choices[0]
        read, written = len(choice.request.request.prompt), len(choice.tokens)
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": choice.job.cached_tokens if choice.job is not None else 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + written,
        }
