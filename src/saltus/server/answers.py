"""An answer of the server: the texts that a request asked for, as they arrive from the engine's thread."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from saltus.engine.infill import AnyRequest
from saltus.engine.prompt_scores import PromptScores
from saltus.engine.request import CallRecord
from saltus.engine.token_texts import TokenText
from saltus.methods.shared.answer_memory import AnswerMemory
from saltus.server.engine_thread import EngineThread
from saltus.server.errors import ApiError
from saltus.server.metrics import ServerMetrics
from saltus.server.protocol import SamplingFields
from saltus.server.served_request import Delta, ServedRequest, serve_text
from saltus.server.usage import speculation_metrics


@dataclass
class Choice:
    """One text of an answer, as far as it has arrived."""

    index: int
    asked: AnyRequest  # its prompt and settings
    served: ServedRequest | None = None
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    scored: list[TokenText] = field(default_factory=list)  # the tokens, with log-probabilities
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_scores: PromptScores | None = None

    @property
    def prompt(self) -> Sequence[int]:
        return self.asked.request.prompt

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.scored += delta.scored
        self.logprobs += delta.logprobs
        self.top_logprobs += delta.top_logprobs
        self.calls += delta.calls
        self.finish_reason = delta.finish_reason
        self.prompt_scores = self.prompt_scores or delta.prompt_scores


@dataclass(frozen=True)
class Backend:
    """What answers need of a server."""

    name: str  # of the model
    tokenizer: Any
    engine_thread: EngineThread
    metrics: ServerMetrics


class Answer:
    """The texts that a request asked for: `whole` or `stream`, one of them once, after `submit`."""

    prefix = ""  # of its id
    score_prompts = False  # the log-probabilities of prompts belong to the answer
    client = ""  # who asks; set before `submit`, as `group`
    group = ""  # see `Request`

    def __init__(self, backend: Backend, requests: Sequence[AnyRequest], method: str, body: SamplingFields) -> None:
        self.backend, self.method, self.body = backend, method, body
        self.choices = [Choice(index, request) for index, request in enumerate(requests)]
        self.id, self.created = self.prefix + uuid.uuid4().hex, int(time.time())
        self.deltas: asyncio.Queue[tuple[int, Delta | ApiError]] = asyncio.Queue()

    def draft_from(self, memory: AnswerMemory) -> None:
        """Draft the texts from earlier answers, too, and remember them. Before `submit`."""
        for choice in self.choices:
            choice.asked.request.memory = memory

    def submit(self) -> None:
        """Queue the texts. Errors: ApiError 429 or 503, before anything of the answer is sent."""
        loop = asyncio.get_running_loop()

        def deliver_to(index: int) -> Any:
            return lambda delta: loop.call_soon_threadsafe(self.deltas.put_nowait, (index, delta))

        for choice in self.choices:
            request = choice.asked.request
            request.group = self.group
            scores = PromptScores(request.prompt, request.top_logprobs) if self.score_prompts else None
            choice.served = serve_text(
                choice.asked, self.method, deliver_to(choice.index), max_draft_tokens=self.body.max_draft_tokens,
                prompt_scores=scores, client=self.client, reuses_prefix=self.body.cache_prompt,
            )  # fmt: skip
        self.backend.engine_thread.submit(*(choice.served for choice in self.choices if choice.served is not None))

    def drop(self) -> None:
        """Stop decoding the texts that are not finished: nobody waits for them any more."""
        for choice in self.choices:
            if choice.finish_reason is None and choice.served is not None and not choice.served.cancelled:
                self.backend.engine_thread.cancel(choice.served)

    async def whole(self) -> dict[str, Any]:
        """The answer as one object. Errors: ApiError."""
        raise NotImplementedError

    def stream(self) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        raise NotImplementedError

    async def arriving(self) -> AsyncIterator[tuple[Choice, Delta]]:
        """Each delta as it comes. Leaving this early drops the texts that are not finished."""
        metrics = self.backend.metrics
        timers = [metrics.timer() for _ in self.choices]
        left = len(self.choices)
        try:
            while left:
                index, delta = await self.deltas.get()
                if isinstance(delta, ApiError):
                    raise delta
                choice = self.choices[index]
                if not choice.calls and choice.served is not None:
                    metrics.count_prompt(len(choice.prompt), choice.served.cached_tokens)
                choice.add(delta)
                timers[index].record(delta.calls, delta.finish_reason)
                left -= delta.finish_reason is not None
                yield choice, delta
        finally:
            self.drop()

    @property
    def calls(self) -> list[CallRecord]:
        """The calls of all texts."""
        return [call for choice in self.choices for call in choice.calls]

    def metrics(self, calls: Sequence[CallRecord]) -> dict[str, Any]:
        """The field with what drafting did in these calls, if the request asks for it."""
        return {"metrics": {"speculative_decoding": speculation_metrics(calls)}} if self.body.include_metrics else {}
