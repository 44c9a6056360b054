"""Put the things that are compared on one footing: each writes an answer, and accounts for it afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from saltus.core.sampling import Sampling
from saltus.engine.detokenizer import Detokenizer
from saltus.engine.engine import Engine
from saltus.engine.results import Generation
from saltus.evaluation.benchmarks.call_recorder import (
    CallRecorder,
    RecordedCall,
    tokens_decided_by_call,
    verification_problems,
)


@dataclass(frozen=True)
class BenchmarkRequest:
    """One text to write, the same for every side."""

    prompt: str | list[dict[str, Any]]  # a text or messages, as `Engine.generate` takes them
    prompt_tokens: tuple[int, ...]  # what the model reads
    raw: bool = False
    stop: tuple[str, ...] = ()
    max_new_tokens: int = 128
    seed: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    ignore_eos: bool = False


@dataclass(frozen=True)
class TimedCall:
    """A call of the model: tokens that it decided, drafted tokens that it checked, wall time, decided tokens read."""

    decided: int
    nodes: int
    seconds: float
    read: int


@dataclass(frozen=True)
class MeasuredAnswer:
    """An answer and how it came about; `calls` is None where a side does not tell."""

    tokens: list[int]
    pieces: list[str]  # the text, by call where calls are known
    finish_reason: str | None
    calls: list[TimedCall] | None
    prefill_seconds: float
    draft_calls: int = 0
    new_tokens: int | None = None  # where the side counts them itself
    problems: list[str] = field(default_factory=list)


@runtime_checkable
class SystemUnderTest(Protocol):
    """Something that writes. Only `write` is timed, from outside."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str:
        """ "method" or "peer"."""
        ...

    def generate(self, request: BenchmarkRequest) -> Any: ...

    def to_answer(self, request: BenchmarkRequest, output: Any) -> MeasuredAnswer:
        """What `write` returned, taken apart."""
        ...


@dataclass
class MethodUnderTest:
    """One of our methods. Its calls are counted by a witness at the network, not by the engine."""

    name: str
    engine: Engine
    call_recorder: CallRecorder
    kind: str = "method"

    def generate(self, request: BenchmarkRequest) -> tuple[list[str], Generation, list[RecordedCall]]:
        self.engine.decoder.prefix_cache.clear()  # every system reads its prompts itself
        self.call_recorder.calls.clear()
        distribution = request.sampling
        stream = self.engine.stream(
            request.prompt, method=self.name, raw=request.raw, stop=request.stop, seed=request.seed,
            max_new_tokens=request.max_new_tokens, ignore_eos=request.ignore_eos, temperature=distribution.temperature,
            top_k=distribution.top_k, top_p=distribution.top_p,
        )  # fmt: skip
        pieces = [chunk.text for chunk in stream]
        return pieces, stream.generation, list(self.call_recorder.calls)

    def to_answer(
        self, request: BenchmarkRequest, output: tuple[list[str], Generation, list[RecordedCall]]
    ) -> MeasuredAnswer:
        pieces, generation, seen = output
        tokens = generation.tokens
        counts = tokens_decided_by_call(seen, request.prompt_tokens, tokens)
        calls = [
            TimedCall(count, call.inputs.num_draft_tokens, call.seconds, call.context_tokens_read)
            for count, call in zip(counts, seen, strict=True)
        ]
        return MeasuredAnswer(
            tokens, pieces, generation.finish_reason, calls, calls[0].seconds if calls else 0.0,
            generation.statistics.draft_calls, problems=verification_problems(seen, request.prompt_tokens, tokens),
        )  # fmt: skip


def methods_under_test(engine: Engine, methods: Sequence[str]) -> list[MethodUnderTest]:
    """A side for each method; they share the engine's model, what it learned of costs, and one witness."""
    witness = CallRecorder(engine.network)
    watched = engine.copy_with(network=witness)
    sides = [MethodUnderTest(name, watched, witness) for name in methods]
    for side in sides:
        watched.decoder.setup(side.name)  # models of the methods' own are loaded now
    return sides


def split_text_by_call(tokenizer: Any, tokens: Sequence[int], tokens_per_call: Sequence[int]) -> list[str]:
    """The text that each call added, for sides that give tokens only."""
    detokenizer, found, at = Detokenizer(tokenizer), [], 0
    for count in tokens_per_call:
        found.append("".join(detokenizer.add(token) for token in tokens[at : at + count]))
        at += count
    return found


def early_end_problems(
    request: BenchmarkRequest, answer: MeasuredAnswer, end_tokens: frozenset[int], available_tokens: int | None
) -> list[str]:
    """A text ends by an end token, a stop string, or where its length is reached; else somebody stopped writing.

    `room` is how many tokens the model's context leaves behind the prompt.
    """
    length = min(request.max_new_tokens, request.max_new_tokens if available_tokens is None else available_tokens)
    count = len(answer.tokens)
    stopped = not request.ignore_eos and count and answer.tokens[-1] in end_tokens
    if count >= length or stopped or (request.stop and answer.finish_reason == "stop"):
        return []
    return [f"ended after {count} of {length} tokens, without an end token"]
