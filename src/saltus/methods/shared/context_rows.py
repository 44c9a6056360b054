"""What a pass of a drafter's layers runs: rows of several texts, and the cache of their context positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from saltus.core.forward import ForwardInputs
from saltus.models.cpu.attention import AttentionCall, SequenceRows
from saltus.models.cpu.kv_cache import KVCache
from saltus.models.protocols import DrafterHost

MAX_ROWS_PER_CALL = 256  # of one pass


@dataclass
class ContextKVCache:
    """Keys and values of one text's context positions: the decided tokens from `first_position` on."""

    new_kv_cache: Callable[[], Any] = KVCache
    first_position: int = 0
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    kv_cache: Any = field(init=False)  # a KVCache, or pages on a GPU

    def __post_init__(self) -> None:
        self.kv_cache = self.new_kv_cache()

    def reuse_prefix(self, tokens: np.ndarray, first_given_position: int) -> int:
        """The position up to which the cache is reused, given new hidden states from `first_given_position` on.

        At least one position is recomputed. Where positions in between are missing, the cache starts anew.
        """
        known = self.tokens[: max(len(tokens) - self.first_position, 0)]
        given = tokens[self.first_position : self.first_position + len(known)]
        same = len(known) if known.tobytes() == given.tobytes() else int((known != given).argmax())
        shared = self.first_position + same
        past = min(shared, len(tokens) - 1)
        if past < first_given_position:
            self.first_position, self.kv_cache, past = first_given_position, self.new_kv_cache(), first_given_position
        return past

    def begin_anew(self, new_kv_cache: Callable[[], Any]) -> None:
        """Forget everything, and hold keys and values in such a cache from now on."""
        self.new_kv_cache, self.first_position, self.tokens = new_kv_cache, 0, self.tokens[:0]
        self.kv_cache = new_kv_cache()

    @property
    def keys(self) -> Tensor | None:
        return self.kv_cache.keys

    @property
    def values(self) -> Tensor | None:
        return self.kv_cache.values


def select_hidden_states(
    hidden_states: Float[Tensor, "*slots given"], layers: Sequence[int], selected: Sequence[int | None]
) -> Float[Tensor, "*slots selected"]:
    """The states after the `selected` layers (None: the last), of states after each of `layers` and the last."""
    if (*layers, None) == tuple(selected):
        return hidden_states
    places = [len(layers) if layer is None else list(layers).index(layer) for layer in selected]
    return hidden_states.unflatten(-1, (len(layers) + 1, -1))[..., places, :].flatten(-2)


def unread_states(
    inputs: ForwardInputs, kv_cache: ContextKVCache, target: DrafterHost, selected: Sequence[int | None]
) -> Float[Tensor, "context states"]:
    """The `selected` hidden states before the last decided tokens: of those whose context is not in the cache."""
    assert inputs.hidden_states is not None
    begin = len(inputs.canvas.decided_prefix) - len(inputs.hidden_states)  # of the given hidden states
    past = kv_cache.reuse_prefix(inputs.canvas.decided_prefix, begin)
    unread = inputs.hidden_states if past == begin else inputs.hidden_states[past - begin :]
    return select_hidden_states(unread, target.layers_of(unread), selected)


@dataclass(frozen=True)
class ContextRows:
    """The rows of one text in a pass, after the `past_length` rows in its cache."""

    inputs: Float[Tensor, "rows hidden"]
    kv_cache: ContextKVCache
    past_length: int
    num_outputs: int  # of the last rows
    causal: bool = True  # False: all rows see each other, and they are few enough for one pass
    causal_windows: bool = True  # the same in layers with a sliding window

    @property
    def num_rows(self) -> int:
        return len(self.inputs)

    def split(self, count: int) -> tuple[ContextRows, ContextRows]:
        """The first rows, of which one has an output, and the others."""
        first = replace(self, inputs=self.inputs[:count], num_outputs=1)
        return first, replace(self, inputs=self.inputs[count:], past_length=self.past_length + count)


@dataclass(frozen=True)
class DraftRows:
    """The rows of one text in a drafter's pass, before they are made: new context positions, then queries."""

    states: Float[Tensor, "context states"]  # of the target before each new token
    tokens: Int[np.ndarray, "context"]  # int64
    queries: Float[Tensor, "queries hidden"]  # added to the last context input
    kv_cache: ContextKVCache
    past_length: int
    causal: ClassVar[bool] = True
    causal_windows: ClassVar[bool] = True

    @property
    def num_rows(self) -> int:
        return len(self.states) + len(self.queries)

    @property
    def num_outputs(self) -> int:
        """The last context position and the queries."""
        return 1 + len(self.queries)

    def split(self, count: int) -> tuple[DraftRows, DraftRows]:
        """The first context positions, without queries, and the others."""
        first = replace(self, states=self.states[:count], tokens=self.tokens[:count], queries=self.queries[:0])
        past = self.past_length + count
        return first, replace(self, states=self.states[count:], tokens=self.tokens[count:], past_length=past)


Rows = TypeVar("Rows", ContextRows, DraftRows)


def run_in_passes(
    texts: Sequence[Rows], run: Callable[[Sequence[Rows]], list[Any]], run_first: Callable[[Sequence[Rows]], Any]
) -> list[Any]:
    """`run` on groups of as many texts as a pass can hold; one result for each text.

    Where a pass cannot hold one text, its first rows go through `run_first`.
    """
    results: list[Any] = []
    waiting: list[Rows] = []
    for text in texts:
        assert text.num_outputs < MAX_ROWS_PER_CALL and (text.causal or text.num_rows <= MAX_ROWS_PER_CALL)
        while text.num_rows > MAX_ROWS_PER_CALL:
            first, text = text.split(min(MAX_ROWS_PER_CALL, text.num_rows - text.num_outputs))
            run_first([first])
        if waiting and sum(each.num_rows for each in (*waiting, text)) > MAX_ROWS_PER_CALL:
            results += run(waiting)
            waiting = []
        waiting.append(text)
    return results + (run(waiting) if waiting else [])


def plan_pass(
    texts: Sequence[Rows], num_layers: int
) -> tuple[Int[Tensor, "rows"], AttentionCall, Int[Tensor, "outputs"]]:
    """Of one pass over texts: the positions of all rows, what they see, and the numbers of those with outputs."""
    positions = [np.arange(text.num_rows) + text.past_length for text in texts]
    rows = [
        SequenceRows(
            text.kv_cache.kv_cache,
            text.past_length,
            text_positions,
            block_mask(text.num_rows, text.causal),
            window_mask=block_mask(text.num_rows, text.causal_windows),
        )
        for text, text_positions in zip(texts, positions, strict=True)
    ]
    counts, ends = [text.num_outputs for text in texts], accumulate(text.num_rows for text in texts)
    outputs = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
    return torch.from_numpy(np.concatenate(positions)), AttentionCall(rows, num_layers), torch.from_numpy(outputs)


@lru_cache(maxsize=64)
def block_mask(rows: int, causal: bool = True) -> UInt8[np.ndarray, "rows rows"]:
    """mask[i, j] is 1 if row i sees row j: all rows, or with `causal` itself and those before it; to be read only."""
    return np.tri(rows, dtype=np.uint8) if causal else np.ones((rows, rows), dtype=np.uint8)
