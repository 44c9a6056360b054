"""Record the network's calls from outside, and check that they really decided a text.

Benchmarks count calls here and do not trust the counts of a method or the engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np

from saltus.core.forward import ForwardInputs, ForwardOutputs

# What protocols of networks have besides `forward` and `new_kv_cache`: TargetNetwork, FillsHoles, DrafterHost,
# KeepsKeysAndValues and ReadsTargetKVCache.
MEMBERS_OF_PROTOCOLS = (
    "model", "batch_invariant", "any_subset", "accepts_drafters", "compute_path", "max_draft_tokens", "blank_token",
    "adapter", "hidden_state_layers", "attach_adapter", "add_hidden_state_layers", "layers_of",
    "keeps_keys_and_values", "num_tokens_in_cache", "reads_target_kv_cache",
)  # fmt: skip


@dataclass(frozen=True)
class RecordedCall:
    """One call for one text: its inputs, the decided tokens that it had to read, and its wall time."""

    inputs: ForwardInputs
    context_tokens_read: int
    seconds: float


@dataclass
class CallRecorder:
    """A network that records its calls; everything else is passed on to the wrapped network."""

    network: Any
    calls: list[RecordedCall] = field(default_factory=list, init=False)

    def new_kv_cache(self) -> Any:
        return self.network.new_kv_cache()

    def forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[Any]) -> list[ForwardOutputs]:
        started = time.perf_counter()
        batch_outputs = self.network.forward(batch, kv_caches)
        seconds = time.perf_counter() - started
        whole = getattr(self.network, "reads_whole_text", False)
        self.calls += [
            RecordedCall(inputs, len(_known_tokens(inputs)) if whole else outputs.context_tokens_read, seconds)
            for inputs, outputs in zip(batch, batch_outputs, strict=True)
        ]
        return batch_outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)


def record_calls(network: Any) -> CallRecorder:
    """A recorder that satisfies the protocols that the network satisfies.

    From Python 3.12 on `isinstance` of a protocol ignores `__getattr__`, so its class has their members.
    """
    members = {name: property(attrgetter(f"network.{name}")) for name in MEMBERS_OF_PROTOCOLS if hasattr(network, name)}
    return type(CallRecorder.__name__, (CallRecorder,), members)(network)


def _known_tokens(inputs: ForwardInputs) -> np.ndarray:
    """The given tokens, on both sides of a hole, and then the decided ones."""
    return inputs.canvas.tokens[inputs.canvas.known_positions]


def tokens_decided_by_call(calls: Sequence[RecordedCall], prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """How many of the text's tokens each call decided, by the number that the next call starts with."""
    text = len(prompt) + len(tokens)
    places = [*(min(len(_known_tokens(seen.inputs)), text) for seen in calls), text]
    return [end - begin for begin, end in pairwise(places)]


def verification_problems(calls: Sequence[RecordedCall], prompt: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """Problems with the claim that these calls decided these tokens after this prompt; empty if it is true.

    Of a text with a hole the prompt is what is given on both sides, and the tokens are those of the hole.

    The first call reads the whole prompt. Each later one continues after the tokens of the call before, and all of
    these but the last were a path in that call's tree, so that the network has evaluated each in its place. A call
    that only drafts, by query nodes, may decide nothing.
    """
    text = np.concatenate([np.asarray(prompt, dtype=np.int64), np.asarray(tokens, dtype=np.int64)])
    if not calls:
        return [f"{len(tokens)} tokens came without a call of the model"] if len(tokens) else []
    problems = []
    first = calls[0]
    if first.context_tokens_read < len(prompt):
        problems.append(f"only {first.context_tokens_read} of the prompt's {len(prompt)} tokens were read")
    ends = [*(len(_known_tokens(seen.inputs)) for seen in calls[1:]), len(text)]
    for number, (seen, end) in enumerate(zip(calls, ends, strict=True)):
        before = _known_tokens(seen.inputs)
        if not np.array_equal(before, text[: len(before)]):
            problems.append(f"call {number} stood after another text than the one that was given out")
            break
        checked = len(seen.inputs.matching_nodes(text[len(before) : end].tolist()))
        if end > len(before) + checked + 1:
            position = len(before) + checked + 1 - len(prompt)
            problems.append(f"token {position} was given out, but never checked by the model")
            break
        if end <= len(before) and not (seen.inputs.query_nodes and not seen.inputs.num_draft_tokens):
            problems.append(f"call {number} decided nothing")
            break
    return problems
