"""Watch the network's calls from outside, and find out whether a text was really decided by them.

What a benchmark counts comes from here, not from the account that a method or the engine gives of itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from saltus.core.forward import ForwardInputs, ForwardOutputs


@dataclass(frozen=True)
class RecordedCall:
    """A call that was made: what was asked, how many decided tokens it had to read, and its wall time."""

    inputs: ForwardInputs
    context_tokens_read: int
    seconds: float


@dataclass
class CallRecorder:
    """A network that keeps a record of what it is asked; everything else is the network's own."""

    network: Any
    calls: list[RecordedCall] = field(default_factory=list, init=False)

    def new_kv_cache(self) -> Any:
        return self.network.new_kv_cache()

    def forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[Any]) -> list[ForwardOutputs]:
        started = time.perf_counter()
        batch_outputs = self.network.forward(batch, kv_caches)
        seconds = time.perf_counter() - started
        self.calls += [
            RecordedCall(inputs, outputs.context_tokens_read, seconds)
            for inputs, outputs in zip(batch, batch_outputs, strict=True)
        ]
        return batch_outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)


def tokens_decided_by_call(calls: Sequence[RecordedCall], prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """How many of the text's tokens each call decided, by where the next one took up."""
    text = len(prompt) + len(tokens)
    places = [*(min(len(seen.inputs.canvas.decided_prefix), text) for seen in calls), text]
    return [end - begin for begin, end in pairwise(places)]


def verification_problems(calls: Sequence[RecordedCall], prompt: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """What is wrong with the claim that these calls decided these tokens after this prompt; nothing, if it is true.

    The first call reads the whole prompt. Each further one stands behind the tokens of the one before, and all of
    these but the last were nodes of that call's tree, one below the other: the network has seen each in its place.
    A call that only drafts, by auxiliary queries, may decide nothing.
    """
    text = np.concatenate([np.asarray(prompt, dtype=np.int64), np.asarray(tokens, dtype=np.int64)])
    if not calls:
        return [f"{len(tokens)} tokens came without a call of the model"] if len(tokens) else []
    found = []
    first = calls[0]
    if first.context_tokens_read < len(prompt):
        found.append(f"only {first.context_tokens_read} of the prompt's {len(prompt)} tokens were read")
    ends = [*(len(seen.inputs.canvas.decided_prefix) for seen in calls[1:]), len(text)]
    for number, (seen, end) in enumerate(zip(calls, ends, strict=True)):
        before = seen.inputs.canvas.decided_prefix
        if not np.array_equal(before, text[: len(before)]):
            found.append(f"call {number} stood behind another text than the one that was given out")
            break
        checked = len(seen.inputs.match_tokens(text[len(before) : end].tolist()))
        if end > len(before) + checked + 1:
            position = len(before) + checked + 1 - len(prompt)
            found.append(f"token {position} was given out, but never checked by the model")
            break
        if end <= len(before) and not (seen.inputs.query_nodes and not seen.inputs.num_draft_tokens):
            found.append(f"call {number} decided nothing")
            break
    return found
