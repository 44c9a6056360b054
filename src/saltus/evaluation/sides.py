"""Put the things that are compared on one footing: each writes an answer, and accounts for it afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from saltus.core.sampling import Sampling
from saltus.engine import Engine, Generation
from saltus.evaluation.witness import Seen, Witness, decided, problems
from saltus.text import Detokenizer


@dataclass(frozen=True)
class Question:
    """One text to write, the same for every side."""

    given: str | list[dict[str, Any]]  # a text or messages, as `Engine.generate` takes them
    tokens: tuple[int, ...]  # what the model reads
    raw: bool = False
    stop: tuple[str, ...] = ()
    max_new_tokens: int = 128
    seed: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    ignore_eos: bool = False


@dataclass(frozen=True)
class Called:
    """A call of the model: tokens that it decided, drafted tokens that it checked, wall time, decided tokens read."""

    decided: int
    nodes: int
    seconds: float
    read: int


@dataclass(frozen=True)
class Written:
    """An answer and how it came about; `calls` is None where a side does not tell."""

    tokens: list[int]
    pieces: list[str]  # the text, by call where calls are known
    finish_reason: str | None
    calls: list[Called] | None
    prefill_seconds: float
    draft_calls: int = 0
    new_tokens: int | None = None  # where the side counts them itself
    problems: list[str] = field(default_factory=list)


@runtime_checkable
class Side(Protocol):
    """Something that writes. Only `write` is timed, from outside."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str:
        """ "method" or "peer"."""
        ...

    def write(self, question: Question) -> Any: ...

    def account(self, question: Question, made: Any) -> Written:
        """What `write` returned, taken apart."""
        ...


@dataclass
class MethodSide:
    """One of our methods. Its calls are counted by a witness at the network, not by the engine."""

    name: str
    engine: Engine
    witness: Witness
    kind: str = "method"

    def write(self, question: Question) -> tuple[list[str], Generation, list[Seen]]:
        self.engine.shelf.kept.clear()  # every side reads its prompts itself
        self.witness.calls.clear()
        law = question.sampling
        stream = self.engine.stream(
            question.given, method=self.name, raw=question.raw, stop=question.stop, seed=question.seed,
            max_new_tokens=question.max_new_tokens, ignore_eos=question.ignore_eos, temperature=law.temperature,
            top_k=law.top_k, top_p=law.top_p,
        )  # fmt: skip
        pieces = [chunk.text for chunk in stream]
        return pieces, stream.generation, list(self.witness.calls)

    def account(self, question: Question, made: tuple[list[str], Generation, list[Seen]]) -> Written:
        pieces, generation, seen = made
        tokens = generation.tokens
        counts = decided(seen, question.tokens, tokens)
        calls = [
            Called(count, call.ask.drafts, call.seconds, call.read) for count, call in zip(counts, seen, strict=True)
        ]
        return Written(
            tokens, pieces, generation.finish_reason, calls, calls[0].seconds if calls else 0.0,
            generation.statistics.draft_calls, problems=problems(seen, question.tokens, tokens),
        )  # fmt: skip


def method_sides(engine: Engine, methods: Sequence[str]) -> list[MethodSide]:
    """A side for each method; they share the engine's model, what it learned of costs, and one witness."""
    witness = Witness(engine.network)
    watched = replace(engine, target=replace(engine.target, network=witness), ensembles={})
    sides = [MethodSide(name, watched, witness) for name in methods]
    for side in sides:
        watched._ensemble(side.name)  # models of the methods' own are loaded now
    return sides


def pieces_of(tokenizer: Any, tokens: Sequence[int], counts: Sequence[int]) -> list[str]:
    """The text that each call added, for sides that give tokens only."""
    detokenizer, found, at = Detokenizer(tokenizer), [], 0
    for count in counts:
        found.append("".join(detokenizer.read(token) for token in tokens[at : at + count]))
        at += count
    return found


def ended_early(question: Question, written: Written, ends: frozenset[int], room: int | None) -> list[str]:
    """A text ends by an end token, a stop string, or where its length is reached; else somebody stopped writing.

    `room` is how many tokens the model's context leaves behind the prompt.
    """
    length = min(question.max_new_tokens, question.max_new_tokens if room is None else room)
    count = len(written.tokens)
    stopped = not question.ignore_eos and count and written.tokens[-1] in ends
    if count >= length or stopped or (question.stop and written.finish_reason == "stop"):
        return []
    return [f"ended after {count} of {length} tokens, without an end token"]
