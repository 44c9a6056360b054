"""The texts that a server decodes, as other threads hand them to the engine's thread, and what comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from saltus.engine.detokenizer import TextOutput
from saltus.engine.infill import AnyRequest
from saltus.engine.prompt_scores import PromptScores
from saltus.engine.request import CallRecord
from saltus.engine.scheduled_request import ScheduledRequest
from saltus.engine.token_texts import TokenText
from saltus.server.errors import ApiError


@dataclass(frozen=True)
class Limits:
    """What a server accepts."""

    max_batch: int = 16  # texts decoded at once
    max_queue: int = 256  # texts that wait
    max_cached_bytes: int = 4 * 2**30  # of the running texts' keys and values; a quarter more is for texts to come

    @property
    def max_texts(self) -> int:
        """Texts that are decoded or wait."""
        return self.max_batch + self.max_queue


@dataclass(frozen=True)
class Delta:
    """What a call added to a text; the last delta has a finish reason."""

    text: str
    calls: tuple[CallRecord, ...]
    scored: tuple[TokenText, ...] = ()  # the tokens whose text is certain, with log-probabilities
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[list[tuple[int, float]], ...] = ()
    finish_reason: str | None = None
    prompt_scores: PromptScores | None = None  # of the first delta, where they were asked for

    @property
    def tokens(self) -> list[int]:
        """The tokens that were decided; of some the text is still held back."""
        return [token for call in self.calls for token in call.tokens]


@dataclass(eq=False)
class ServedRequest(ScheduledRequest):
    """One text for the engine's thread. `deliver` gets Deltas, and at last one with a finish reason, or an error."""

    asked: AnyRequest = field(kw_only=True)  # whose `request` is decoded
    deliver: Callable[[Delta | ApiError], None] = field(kw_only=True)
    cancelled: bool = field(default=False, init=False)  # set by any thread: the text is dropped between two calls
    num_delivered: int = field(default=0, init=False)  # of the request's calls
    num_scored: int = field(default=0, init=False)  # tokens delivered with log-probabilities


def serve_text(
    asked: AnyRequest, method: str, deliver: Callable[[Delta | ApiError], None], **settings: Any
) -> ServedRequest:
    """A text for the engine's thread; `settings` are fields of `ScheduledRequest`."""
    return ServedRequest(asked.request, method, asked=asked, deliver=deliver, **settings)


def next_delta(served: ServedRequest) -> Delta:
    """What the calls since the last delta have added."""
    request, output, first = served.request, served.asked.output, not served.num_delivered
    calls = tuple(request.calls[served.num_delivered :])
    served.num_delivered += len(calls)
    text = output.release(request.finished)
    scored: tuple[TokenText, ...] = ()
    if isinstance(output, TextOutput) and output.token_texts is not None:
        scored = tuple(output.token_texts.take(output.num_released, request.finished))
    part = slice(served.num_scored, served.num_scored + len(scored))
    served.num_scored += len(scored)
    logprobs, top = tuple(request.log_probabilities[part]), tuple(request.top_log_probabilities[part])
    return Delta(text, calls, scored, logprobs, top, request.finish_reason, served.prompt_scores if first else None)


@runtime_checkable
class RequestCallbacks(Protocol):
    """Called as the texts of a server are decoded, by the engine's thread, which waits for it."""

    def begins(self, served: ServedRequest) -> None:
        """Before a text's first call."""
        ...

    def called(self, seconds: float) -> None:
        """After a call of the running texts, which took so long."""
        ...

    def ends(self, served: ServedRequest) -> None:
        """After its last call, unless it failed; also after it was dropped, and then its text is not finished."""
        ...

    def idle(self) -> None:
        """After some time without a text."""
        ...
