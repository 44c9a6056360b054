"""The interface of everything that a benchmark compares: it answers a request, and accounts for it afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

from saltus.core.sampling import Sampling
from saltus.engine.detokenizer import Detokenizer
from saltus.engine.engine import Engine
from saltus.engine.infill_template import InfillTemplate
from saltus.engine.results import Generation, Infilling
from saltus.engine.scheduler import run_requests
from saltus.evaluation.benchmarks.call_recorder import (
    CallRecorder,
    RecordedCall,
    record_calls,
    tokens_decided_by_call,
    verification_problems,
)
from saltus.evaluation.benchmarks.draft_counts import AcceptanceHistogram, DraftCounts, count_drafts
from saltus.models.protocols import TargetNetwork


@dataclass(frozen=True)
class BenchmarkRequest:
    """One request, the same for every system."""

    prompt: str | list[dict[str, Any]]  # a text or messages, as `Engine.generate` takes them
    prompt_tokens: tuple[int, ...]  # what the model reads
    raw: bool = False
    stop: tuple[str, ...] = ()
    max_new_tokens: int = 128
    seed: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    ignore_eos: bool = False
    suffix: str | None = None  # a causal model writes what stands between prompt and suffix
    end_tokens: frozenset[int] = frozenset()  # that end this text, besides those of the model
    # One hole to fill in place of a continuation: `prompt_tokens` are then those on both sides.
    template: InfillTemplate | None = None
    hole_end: int | None = None  # the token that ends an open hole, which has `max_new_tokens` tokens at most


@dataclass(frozen=True)
class TimedCall:
    """One call of the model; the fields are keys of records.jsonl."""

    decided: int  # tokens that it decided
    nodes: int  # draft tokens that it verified
    seconds: float
    read: int  # decided tokens that it read: the prompt, at first
    drafters: dict[str, DraftCounts] = field(default_factory=dict)  # that offered tokens for it


@dataclass(frozen=True)
class MeasuredAnswer:
    """An answer and its calls; `calls` is None if the system does not report them."""

    tokens: list[int]
    pieces: list[str]  # the text, split by call if calls are known
    finish_reason: str | None
    calls: list[TimedCall] | None
    prefill_seconds: float
    draft_calls: int = 0
    new_tokens: int | None = None  # if the system counts them itself
    problems: list[str] = field(default_factory=list)
    acceptance: dict[str, AcceptanceHistogram] = field(default_factory=dict)  # by drafter


@runtime_checkable
class SystemUnderTest(Protocol):
    """A method of Saltus or a baseline. `generate` is timed from outside."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str:
        """ "method" or "baseline"."""
        ...

    def generate(self, request: BenchmarkRequest) -> Any: ...

    def to_answer(self, request: BenchmarkRequest, output: Any) -> MeasuredAnswer:
        """Turn the output of `generate` into a MeasuredAnswer; not timed."""
        ...


@runtime_checkable
class PreparesForText(Protocol):
    """A system that makes room for a text before it is timed."""

    def prepare(self, request: BenchmarkRequest) -> None: ...


@dataclass
class MethodUnderTest:
    """A method of Saltus. Its calls are counted by a CallRecorder around the network, not by the engine."""

    name: str
    engine: Engine
    call_recorder: CallRecorder
    kind: str = "method"
    method: str | None = None  # that decodes; None: the one of this name

    def generate(self, request: BenchmarkRequest) -> tuple[list[str], Generation | Infilling, list[RecordedCall]]:
        self.engine.decoder.prefix_tree.clear()  # every system reads its prompts itself
        self.call_recorder.calls.clear()
        sampling, method = request.sampling, self.method or self.name
        if request.template is not None:
            prepared = self.engine.infill_request(
                request.template, open_tokens=request.max_new_tokens, verbatim=True, seed=request.seed,
                temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
                coupling=sampling.coupling,
            )  # fmt: skip
            for _ in run_requests(self.engine.decoder, [prepared.request], method):
                pass
            infilling = prepared.infilling()
            return infilling.token_texts[0], infilling, list(self.call_recorder.calls)
        stream = self.engine.stream(
            request.prompt, method=method, raw=request.raw, stop=request.stop, seed=request.seed,
            max_new_tokens=request.max_new_tokens, ignore_eos=request.ignore_eos, temperature=sampling.temperature,
            top_k=sampling.top_k, top_p=sampling.top_p, coupling=sampling.coupling, suffix=request.suffix,
        )  # fmt: skip
        pieces = [chunk.text for chunk in stream]
        return pieces, stream.generation, list(self.call_recorder.calls)

    def to_answer(
        self, request: BenchmarkRequest, output: tuple[list[str], Generation | Infilling, list[RecordedCall]]
    ) -> MeasuredAnswer:
        pieces, generation, seen = output
        tokens = generation.tokens
        if ended := request.hole_end in tokens:
            tokens = tokens[: tokens.index(request.hole_end) + 1]  # those after it are not decided
        counts = tokens_decided_by_call(seen, request.prompt_tokens, tokens)
        parts = [slice(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]
        if isinstance(generation, Infilling):
            pieces = ["".join(pieces[part]) for part in parts]
            reason = "stop" if ended else "length"
        else:
            reason = generation.finish_reason
        histograms: dict[str, AcceptanceHistogram] = {}
        calls = [
            TimedCall(
                count, call.inputs.num_draft_tokens, call.seconds, call.context_tokens_read,
                count_drafts(call.inputs, tokens[part], histograms),
            )
            for part, count, call in zip(parts, counts, seen, strict=True)
        ]  # fmt: skip
        return MeasuredAnswer(
            tokens, pieces, reason, calls, calls[0].seconds if calls else 0.0,
            generation.statistics.draft_calls, problems=verification_problems(seen, request.prompt_tokens, tokens),
            acceptance=histograms,
        )  # fmt: skip


@dataclass(frozen=True)
class MethodVariant:
    """A method with options of its own, under a name that says so."""

    name: str
    method: str
    options: Mapping[str, Mapping[str, Any]]  # fields by method


def methods_under_test(engine: Engine, methods: Sequence[str | MethodVariant]) -> list[MethodUnderTest]:
    """A system for each method, with the engine's options unless it has its own.

    They share the engine's model, its draft networks and call costs, and one CallRecorder. What one learns of a text,
    another does not know.
    """
    recorder = record_calls(engine.network)
    assert isinstance(recorder, TargetNetwork)
    recorded = engine.copy_with(network=recorder)
    options = engine.decoder.options
    variants = [each if isinstance(each, MethodVariant) else MethodVariant(each, each, options) for each in methods]
    shared = {"prefix_tree": recorded.decoder.prefix_tree, "draft_networks": recorded.decoder.draft_networks}
    systems = [
        MethodUnderTest(each.name, recorded.copy_with(options=each.options, **shared), recorder, method=each.method)
        for each in variants
    ]
    for each, system in zip(variants, systems, strict=True):
        system.engine.decoder.setup(each.method)  # load draft models now
    return systems


def split_text_by_call(engine: Engine, tokens: Sequence[int], tokens_per_call: Sequence[int]) -> list[str]:
    """The text that each call added, for systems that report tokens only."""
    detokenizer, pieces, at = Detokenizer(engine.tokenizer, hidden=engine.target.end_tokens), [], 0
    for count in tokens_per_call:
        pieces.append("".join(detokenizer.add(token) for token in tokens[at : at + count]))
        at += count
    return pieces


def early_end_problems(
    request: BenchmarkRequest, answer: MeasuredAnswer, end_tokens: frozenset[int], available_tokens: int | None
) -> list[str]:
    """A problem if a text ends without an end token, a stop string, or its full length.

    `available_tokens` is how many tokens the context leaves after the prompt; None: no limit.
    """
    length = min(request.max_new_tokens, request.max_new_tokens if available_tokens is None else available_tokens)
    count = len(answer.tokens)
    stopped = not request.ignore_eos and count and answer.tokens[-1] in end_tokens
    if count >= length or stopped or (request.stop and answer.finish_reason == "stop"):
        return []
    return [f"ended after {count} of {length} tokens, without an end token"]
