"""What decoding returns: results, statistics, and streams of chunks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from saltus.engine.infill_template import InfillLayout
from saltus.engine.request import CallRecord, Request
from saltus.engine.settings import PromptLike


@dataclass(frozen=True)
class Statistics:
    """Counts and times of one text. Seconds are wall time; in a batch they include the work on the other texts."""

    calls: int  # calls of the target, including calls in which a method only drafts
    tokens: int  # decided tokens, the end token included; the padding after the end of a hole is not counted
    tokens_per_call: float
    seconds: float  # prefill included
    tokens_per_second: float
    prefill_seconds: float  # of the first call, which reads the prompt and decides the first token or more
    tokens_by_call: list[int]  # tokens that each verification call decided, the verifier's own token included
    draft_calls: int  # calls of draft models
    ms_per_call: float  # median, without the prefill
    nodes_per_call: float  # draft tokens that a call verified, mean

    def __str__(self) -> str:
        """The line that commands print below an answer."""
        counts = [
            f"{count:,} {noun}{'' if count == 1 else 's'}"
            for count, noun in ((self.tokens, "token"), (self.calls, "call"))
        ]
        rates = f"{self.tokens_per_call:.2f} tokens a call · {self.tokens_per_second:.1f} tokens/s"
        return f"{' in '.join(counts)} · {rates} · prefill {self.prefill_seconds:.2f} s"


def statistics_of(request: Request) -> Statistics:
    """The statistics of a request as far as it has been decoded."""
    tokens_by_call = [len(call.tokens) - call.num_padding_tokens for call in request.calls]
    calls, tokens = request.calls_by_network["target"], sum(tokens_by_call)
    later = request.calls[1:] or request.calls
    return Statistics(
        calls=calls,
        tokens=tokens,
        tokens_per_call=tokens / calls if calls else 0.0,
        seconds=request.seconds,
        tokens_per_second=tokens / request.seconds if request.seconds else 0.0,
        prefill_seconds=request.calls[0].seconds if request.calls else 0.0,
        tokens_by_call=tokens_by_call,
        draft_calls=sum(request.calls_by_network.values()) - calls,
        ms_per_call=1000 * statistics.median(call.seconds for call in later) if request.calls else 0.0,
        nodes_per_call=statistics.fmean(call.num_draft_tokens for call in request.calls) if request.calls else 0.0,
    )


@dataclass(frozen=True)
class Generation:
    """A continuation of a prompt, and how it was decoded."""

    prompt: PromptLike
    text: str
    tokens: list[int]
    finish_reason: str | None  # "stop": an end token or a stop string; "length"; None: it was interrupted
    calls: list[CallRecord] = field(repr=False)
    logprobs: list[float] | None
    statistics: Statistics


@dataclass(frozen=True)
class Infilling:
    """A text whose holes were filled, and how they were decoded."""

    layout: InfillLayout = field(repr=False)
    text: str  # the whole text
    fillings: list[str]  # the text in each hole
    token_texts: list[list[str]]  # for each hole the text that each of its tokens adds
    tokens: list[int]  # decided tokens, hole by hole
    calls: list[CallRecord] = field(repr=False)
    logprobs: list[float] | None
    statistics: Statistics
    finish_reason: str | None = None  # of a causal model's hole: stop, or length where open_tokens cut it off


@dataclass(frozen=True)
class Chunk:
    """What one call added to a stream. Half a character, or what may begin a stop string, is held back."""

    text: str
    tokens: list[int]
    call_index: int  # index of the call that decided the tokens; −1 where there was none
    finish_reason: str | None = None  # of the last chunk


Result = TypeVar("Result")


class _Stream(Generic[Result]):
    def __init__(self, chunks: Generator[Chunk], result: Callable[[], Result]) -> None:
        self._chunks, self._result = chunks, result

    def __iter__(self) -> _Stream[Result]:
        return self

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def close(self) -> None:
        """Stop decoding; the result so far stays available."""
        self._chunks.close()


class Stream(_Stream[Generation]):
    """An iterator over chunks that may be left at any time."""

    @property
    def generation(self) -> Generation:
        """What has been decoded so far."""
        return self._result()


class InfillStream(_Stream[Infilling]):
    """An iterator over chunks of the whole text, given pieces included, that may be left at any time."""

    @property
    def infilling(self) -> Infilling:
        """What has been decoded so far."""
        return self._result()
