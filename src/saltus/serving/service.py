"""Answer OpenAI's requests with an engine, as JSON objects or as streams of them."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.concurrency import run_in_threadpool

from saltus.engine.engine import Engine, TextRequest
from saltus.engine.request import CallRecord
from saltus.serving.batching import Batcher, Job, Limits, Part
from saltus.serving.errors import ApiError
from saltus.serving.metrics import ServerMetrics
from saltus.serving.protocol import ChatCompletionRequest, CompletionRequest
from saltus.serving.translation import (
    chosen_seed,
    completion_prompts,
    conversation,
    max_tokens_of,
    requested_method,
    speculation_metrics,
    text_request,
    usage,
)


@dataclass
class _Choice:
    """One text of an answer, as far as it has arrived."""

    index: int
    request: TextRequest
    job: Job | None = None
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, part: Part) -> None:
        self.text += part.text
        self.tokens += _tokens(part)
        self.logprobs += part.logprobs
        self.top_logprobs += part.top_logprobs
        self.calls += part.calls
        self.finish_reason = part.finish_reason


class _ChatForm:
    """The objects of chat completions."""

    def __init__(self, tokenizer: Any, logprobs: bool) -> None:
        self.tokenizer, self.logprobs = tokenizer, logprobs

    prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, choice: _Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.tokens, choice.logprobs, choice.top_logprobs),
            "finish_reason": choice.finish_reason,
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        return {
            "index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None,
        }  # fmt: skip

    def delta(self, choice: _Choice, part: Part) -> dict[str, Any]:
        return {
            "index": choice.index,
            "delta": {"content": part.text} if part.text else {},
            "logprobs": self._logprobs(_tokens(part), part.logprobs, part.top_logprobs),
            "finish_reason": part.finish_reason,
        }

    def _logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float], top: Sequence[list[tuple[int, float]]]
    ) -> dict[str, Any] | None:
        if not self.logprobs:
            return None

        def entry(token: int, value: float) -> dict[str, Any]:
            text = self.tokenizer.decode([token])
            return {"token": text, "logprob": value, "bytes": list(text.encode())}

        listed = top or [[]] * len(tokens)
        return {
            "content": [
                {**entry(token, value), "top_logprobs": [entry(*one) for one in likely]}
                for token, value, likely in zip(tokens, logprobs, listed, strict=False)
            ],
            "refusal": None,
        }


class _TextForm:
    """The objects of completions."""

    def __init__(self, tokenizer: Any, logprobs: bool, echoes: Sequence[str]) -> None:
        self.tokenizer, self.logprobs, self.echoes = tokenizer, logprobs, echoes

    prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def choice(self, choice: _Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": self.echoes[choice.index] + choice.text,
            "logprobs": self._logprobs(choice.tokens, choice.logprobs, choice.top_logprobs),
            "finish_reason": choice.finish_reason,
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        if not self.echoes[index]:
            return None
        return {"index": index, "text": self.echoes[index], "logprobs": None, "finish_reason": None}

    def delta(self, choice: _Choice, part: Part) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": part.text,
            "logprobs": self._logprobs(_tokens(part), part.logprobs, part.top_logprobs),
            "finish_reason": part.finish_reason,
        }

    def _logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float], top: Sequence[list[tuple[int, float]]]
    ) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        texts = [self.tokenizer.decode([token]) for token in tokens[: len(logprobs)]]
        offsets = [sum(map(len, texts[:place])) for place in range(len(texts))]
        # by text: of tokens that are written alike the likeliest stays
        listed = [{self.tokenizer.decode([token]): value for token, value in reversed(likely)} for likely in top]
        return {
            "tokens": texts, "token_logprobs": list(logprobs), "top_logprobs": listed or None, "text_offset": offsets,
        }  # fmt: skip


class Service:
    """One model, its batch, and its metrics."""

    def __init__(self, engine: Engine, name: str, limits: Limits) -> None:
        self.engine, self.name = engine, name
        self.batcher = Batcher(engine, limits)
        self.metrics = ServerMetrics(name, self.batcher)
        self.started = int(time.time())

    async def chat(self, asked: ChatCompletionRequest) -> Answer:
        """The answer to a conversation."""
        self.check_model(asked.model)
        method, seed = requested_method(asked.speculative, self.engine.method), chosen_seed(asked)
        messages, limit = conversation(asked.messages), max_tokens_of(asked)
        requests = [
            await run_in_threadpool(text_request, self.engine, messages, asked, limit, seed + i, raw=False)
            for i in range(asked.n)
        ]
        form = _ChatForm(self.engine.tokenizer, asked.logprobs)
        return Answer(self, form, requests, method, asked)

    async def complete(self, asked: CompletionRequest) -> Answer:
        """Continuations of texts."""
        self.check_model(asked.model)
        method, seed, limit = (
            requested_method(asked.speculative, self.engine.method),
            chosen_seed(asked),
            asked.max_tokens,
        )
        prompts = completion_prompts(asked.prompt)
        requests = [
            await run_in_threadpool(text_request, self.engine, prompt, asked, limit, seed + i, raw=True)
            for prompt in prompts
            for i in range(asked.n)
        ]
        echoes = [
            self._echo(prompt) if asked.echo else "" for prompt in prompts for _ in range(asked.n)
        ]  # fmt: skip
        return Answer(
            self, _TextForm(self.engine.tokenizer, asked.logprobs is not None, echoes), requests, method, asked
        )

    def _echo(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self.engine.tokenizer.decode(prompt)

    def check_model(self, asked: str | None) -> None:
        """Raise ApiError 404 for another model."""
        if asked is not None and asked not in (self.name, "default"):
            raise ApiError(
                404, f"the model {asked!r} is not served here, but {self.name!r} is", "model", "model_not_found"
            )


class Answer:
    """The texts that a request asked for: `whole` or `stream`, one of them once."""

    def __init__(
        self,
        service: Service,
        form: _ChatForm | _TextForm,
        requests: Sequence[TextRequest],
        method: str,
        asked: ChatCompletionRequest | CompletionRequest,
    ) -> None:
        self.service, self.form, self.method, self.asked = service, form, method, asked
        self.choices = [_Choice(index, request) for index, request in enumerate(requests)]
        self.id, self.created = form.prefix + uuid.uuid4().hex, int(time.time())
        self.parts: asyncio.Queue[tuple[int, Part | ApiError]] = asyncio.Queue()

    def submit(self) -> None:
        """Queue the texts. Errors: ApiError 429 or 503, before anything of the answer is sent."""
        loop = asyncio.get_running_loop()

        def deliver_to(index: int) -> Any:
            return lambda part: loop.call_soon_threadsafe(self.parts.put_nowait, (index, part))

        for choice in self.choices:
            choice.job = Job(choice.request, self.method, deliver_to(choice.index))
        self.service.batcher.submit(*(choice.job for choice in self.choices if choice.job is not None))

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        async for _ in self._arriving():
            pass
        answer = self._object(self.form.object, [self.form.choice(choice) for choice in self.choices])
        answer["usage"] = self._usage()
        if self.asked.include_metrics:
            answer["metrics"] = {"speculative_decoding": speculation_metrics(self._calls())}
        return answer

    async def stream(self) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        options = self.asked.stream_options
        continuous = options is not None and options.continuous_usage_stats

        def event(choices: list[dict[str, Any]], with_usage: bool = continuous) -> str:
            chunk = self._object(self.form.chunk_object, choices)
            if with_usage:
                chunk["usage"] = self._usage()
            return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"

        try:
            for choice in self.choices:
                if (opening := self.form.opening(choice.index)) is not None:
                    yield event([opening])
            async for choice, part in self._arriving():
                if part.text or part.logprobs or part.finish_reason is not None:
                    yield event([self.form.delta(choice, part)])
            if options is not None and options.include_usage:
                yield event([], True)
        except ApiError as error:
            yield f"data: {json.dumps(error.body())}\n\n"
        yield "data: [DONE]\n\n"

    async def _arriving(self) -> AsyncIterator[tuple[_Choice, Part]]:
        """Each part as it comes. Leaving this early drops the texts that are not finished."""
        metrics = self.service.metrics
        timers = [metrics.timer() for _ in self.choices]
        left = len(self.choices)
        try:
            while left:
                index, part = await self.parts.get()
                if isinstance(part, ApiError):
                    raise part
                choice = self.choices[index]
                if not choice.calls and choice.job is not None:
                    metrics.count_prompt(len(choice.request.request.prompt), choice.job.cached_tokens)
                choice.add(part)
                timers[index].record(part.calls, part.finish_reason)
                left -= part.finish_reason is not None
                yield choice, part
        finally:
            for choice in self.choices:
                if choice.finish_reason is None and choice.job is not None:
                    self.service.batcher.cancel(choice.job)

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.service.name, "choices": choices,
        }  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        each_prompt = self.choices[:: self.asked.n]
        return usage(
            sum(len(choice.request.request.prompt) for choice in each_prompt),
            sum(len(choice.tokens) for choice in self.choices),
            sum(choice.job.cached_tokens for choice in each_prompt if choice.job is not None),
            self._calls() if getattr(self.asked, "prediction", None) is not None else None,
        )

    def _calls(self) -> list[CallRecord]:
        return [call for choice in self.choices for call in choice.calls]


def _tokens(part: Part) -> list[int]:
    return [token for call in part.calls for token in call.tokens]
