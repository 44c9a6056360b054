"""One text to decode: its settings, and the record of every call that worked on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from saltus.core.canvas import Canvas, continuation
from saltus.core.constraint import Constraint
from saltus.core.distributions import Step
from saltus.core.sampling import Sampling, log_probabilities
from saltus.methods.shared.answer_memory import AnswerMemory


@dataclass(frozen=True)
class CallRecord:
    """What one call of the target did for one request."""

    index: int
    tokens: tuple[int, ...]  # decided by the call
    num_draft_tokens: int  # draft tokens that the call verified
    seconds: float  # wall time of the whole batched call
    context_tokens_read: int  # decided tokens that were not in the KV cache: the prompt, at first
    num_padding_tokens: int = 0  # how many of `tokens` pad the hole that the one before them ended


@dataclass
class Request:
    """One text to decode, and its output so far."""

    prompt: Sequence[int]
    max_new_tokens: int
    seed: int
    sampling: Sampling
    is_end: Callable[[int], bool] = lambda token: False  # called with each new token once, in order: True ends the text
    logprobs: bool = False
    canvas: Canvas | None = None  # the text with its holes; None: a continuation of the prompt
    on_step: Callable[[Step], None] | None = None  # called after each decoding step
    top_logprobs: int = 0  # with logprobs: how many of the likeliest tokens to list at each position
    constraint: Constraint | None = None  # on the new tokens
    prediction: Sequence[int] = ()  # tokens that the text is expected to repeat; drafters may copy from them
    memory: AnswerMemory | None = None  # earlier answers; drafters may copy from them
    group: str = ""  # requests of one group may be drafted by what drafters learned from each other's texts
    calls: list[CallRecord] = field(default_factory=list, init=False)
    log_probabilities: list[float] = field(default_factory=list, init=False)
    top_log_probabilities: list[list[tuple[int, float]]] = field(default_factory=list, init=False)  # (token, its own)
    calls_by_network: Counter[str] = field(default_factory=Counter, init=False)
    seconds: float = field(default=0.0, init=False)
    ended: bool = field(default=False, init=False)  # by `is_end`
    num_decided: int = field(default=0, init=False)  # tokens of all calls

    @property
    def tokens(self) -> list[int]:
        """The ids of the tokens decided so far, in the order of the calls."""
        return [token for call in self.calls for token in call.tokens]

    @property
    def finished(self) -> bool:
        """True if the text has ended, or has as many tokens as it may have."""
        return self.ended or self.num_decided >= self.max_new_tokens

    @property
    def finish_reason(self) -> str | None:
        """ "stop" if `is_end` ended the text, "length" at `max_new_tokens`, None while it is unfinished."""
        return "stop" if self.ended else "length" if self.finished else None

    def new_canvas(self) -> Canvas:
        """The canvas to decode from the start."""
        return continuation(self.prompt, self.max_new_tokens) if self.canvas is None else self.canvas

    def stop(self, canvas: Canvas, tokens: np.ndarray) -> int | None:
        """A StopCondition: how many of the new tokens to keep if the text ends among them."""
        for count, token in enumerate(tokens.tolist(), start=1):
            if self.is_end(token):
                self.ended = True
                return count
        return None

    def record(self, step: Step) -> None:
        """Add a decoding step to the record."""
        inputs, outputs, num_padding = step.inputs, step.outputs, step.num_padding_tokens
        tokens = tuple(step.tokens.tolist())
        self.calls.append(
            CallRecord(
                len(self.calls), tokens, inputs.num_draft_tokens, outputs.seconds, outputs.context_tokens_read,
                num_padding,
            )
        )  # fmt: skip
        self.num_decided += len(tokens)
        if self.logprobs:
            rows = [0, *(node + 1 for node in inputs.path(step.last_node))]
            for row, token in zip(rows, tokens[: len(tokens) - num_padding], strict=False):
                own, likeliest = log_probabilities(outputs.logits[row], token, self.top_logprobs)
                self.log_probabilities.append(own)
                if self.top_logprobs:
                    self.top_log_probabilities.append(likeliest)
            self.log_probabilities += [0.0] * num_padding
        if self.on_step is not None:
            self.on_step(step)
