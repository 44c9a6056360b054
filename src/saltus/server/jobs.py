"""The texts that a server decodes, as other threads hand them to the engine's thread, and what comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from saltus.core.scheduler import SequenceState
from saltus.engine.engine import AnyRequest
from saltus.engine.prompt_scores import PromptScores
from saltus.engine.request import CallRecord
from saltus.server.errors import ApiError


@dataclass(frozen=True)
class Limits:
    """What a server accepts."""

    max_batch: int = 16  # texts decoded at once
    max_queue: int = 256  # texts that wait
    max_cached_bytes: int = 4 * 2**30  # of the running texts' keys and values; a quarter more is for texts to come


@dataclass(frozen=True)
class Delta:
    """What a call added to a text; the last delta has a finish reason."""

    text: str
    calls: tuple[CallRecord, ...]
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[list[tuple[int, float]], ...] = ()
    finish_reason: str | None = None
    prompt_scores: PromptScores | None = None  # of the first delta, where they were asked for

    @property
    def tokens(self) -> list[int]:
        """The tokens that were decided; of some the text is still held back."""
        return [token for call in self.calls for token in call.tokens]


@dataclass(eq=False)
class Job:
    """One text for the engine's thread. `deliver` gets Deltas, and at last one with a finish reason, or an error."""

    request: AnyRequest
    method: str
    deliver: Callable[[Delta | ApiError], None]
    budget: int | None = None  # draft tokens of a call, at most; None: the server's
    prompt_scores: PromptScores | None = None  # to be filled while the prompt is read
    client: str = ""  # who asks; clients take turns
    request_number: int = 0  # of the request that the text belongs to, such as one for several choices; set by `submit`
    cancelled: bool = False  # set by any thread: the text is dropped between two calls
    cached_tokens: int = 0  # of the prompt, found in the tree of prefixes
    sequence: SequenceState | None = None
    unread: int = 0  # tokens of the prompt to be read before the text is decoded
    num_delivered: int = 0  # of the request's calls
    num_tokens_delivered: int = 0
    failure: ApiError | None = None  # what ended its decoding, and no other text's

    @property
    def num_tokens(self) -> int:
        """The longest that the text can get."""
        return len(self.request.request.prompt) + self.request.request.max_new_tokens


def next_delta(job: Job) -> Delta:
    """What the calls since the last delta have added."""
    request, before, first = job.request.request, job.num_tokens_delivered, not job.num_delivered
    calls = tuple(request.calls[job.num_delivered :])
    job.num_delivered += len(calls)
    job.num_tokens_delivered += sum(len(call.tokens) for call in calls)
    logprobs, top = tuple(request.log_probabilities[before:]), tuple(request.top_log_probabilities[before:])
    text = job.request.output.release(request.finished)
    return Delta(text, calls, logprobs, top, request.finish_reason, job.prompt_scores if first else None)


@runtime_checkable
class RequestCallbacks(Protocol):
    """Called as the texts of a server are decoded, by the engine's thread, which waits for it."""

    def begins(self, job: Job) -> None:
        """Before a text's first call."""
        ...

    def called(self, seconds: float) -> None:
        """After a call of the running texts, which took so long."""
        ...

    def ends(self, job: Job) -> None:
        """After its last call, unless it was dropped or failed."""
        ...

    def idle(self) -> None:
        """After some time without a text."""
        ...
