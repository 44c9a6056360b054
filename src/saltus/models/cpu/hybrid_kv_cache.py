"""Keep what recurrent layers remember of one text, beside the keys and values of its attention layers.

A state can be continued but not cut. So it is kept after decided tokens only: of a tree's nodes there are the small
inputs (keys, values, steps; inputs of a convolution), and the next call begins by applying those of the accepted nodes,
by the operations of a decided token. Where a text differs from what was read, the newest *snapshot* before that place
is continued: a copy of all states at a position.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from saltus.kernels import native
from saltus.kernels.native import structs
from saltus.models.cpu.kv_cache import KVCache

SNAPSHOT_INTERVAL = 1024  # tokens; doubled while a text would have more snapshots than follows
MAX_INTERVALS = 8
END_DISTANCES = 1, 16  # of a prompt's snapshots from its end: see `_snapshot_positions`
MIN_PROMPT = 32  # tokens that a call reads; a text that has gone back may read fewer with every draft
MIN_NODES = 32  # whose inputs there is memory for, at least


@dataclass(frozen=True)
class StateSizes:
    """What the recurrent layers of a network keep, in bytes, and which layers keep keys and values."""

    state: int  # of a text: all states of all layers
    node: int  # of a tree's node: its inputs in all layers
    attention: tuple[tuple[int, int], ...] = ()  # beside them: heads of keys and values, and their size, by layer

    def of_text(self, num_tokens: int, max_nodes: int = MIN_NODES) -> int:
        """The most that a text of so many tokens keeps besides keys and values.

        state · (1 + 2 + min(8, tokens / 1024)) + node · nodes: the state, the snapshots of the prompt's end and of
        every 1,024 tokens, and the inputs of the largest tree so far.
        """
        snapshots = len(END_DISTANCES) + min(MAX_INTERVALS, num_tokens // SNAPSHOT_INTERVAL)
        return self.state * (1 + snapshots) + self.node * max_nodes


@dataclass
class HybridKVCache(KVCache):
    """The states after the first `num_read` tokens; those after them are `accepted` nodes of the call before."""

    sizes: StateSizes = field(default=StateSizes(0, 0), kw_only=True)
    num_read: int = field(default=0, kw_only=True)
    states: Tensor = field(init=False)  # [bytes]
    inputs: Tensor = field(init=False)  # [bytes]: of nodes
    accepted: list[int] = field(default_factory=list, init=False)
    snapshots: dict[int, Tensor] = field(default_factory=dict, kw_only=True)  # by position; never written to
    went_back: bool = field(default=False, init=False)  # to a snapshot, as a draft model's texts often do
    in_call: bool = field(default=False, init=False)  # True after a call that failed: states are of different tokens

    def __post_init__(self) -> None:
        self.states = self.snapshots[self.num_read].clone() if self.num_read else self._new_states()
        self.inputs = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Of states, snapshots and nodes' inputs."""
        return sum(x.nbytes for x in (self.states, self.inputs, *self.snapshots.values()))

    def _new_states(self) -> Tensor:
        return torch.zeros(self.sizes.state, dtype=torch.uint8)  # the room between layers is never written

    def reuse_prefix(self, tokens: np.ndarray, num_recomputed: int = 1) -> int:
        if self.pending_tree is not None:
            assert not self.accepted, "a call applies what was accepted"
            self.accepted = self.pending_tree.matching_nodes(tokens[len(self.tokens) :])
        count = super().reuse_prefix(tokens, num_recomputed)
        if self.in_call or count < self.num_read:
            return self._go_back(count)
        self.accepted = self.accepted[: count - self.num_read]
        return count

    def _go_back(self, limit: int) -> int:
        """Continue the newest snapshot of at most `limit` tokens, or begin anew; returns how many tokens it has."""
        self.snapshots = {position: states for position, states in self.snapshots.items() if position <= limit}
        self.num_read = max(self.snapshots, default=0)
        if self.num_read:
            self.states.copy_(self.snapshots[self.num_read])
        else:
            self.states.zero_()
        self.tokens, self.accepted = self.tokens[: self.num_read], []
        self.went_back, self.in_call = True, False
        return self.num_read

    def begin_call(self, first: int, past: int, decided: int, parents: Sequence[int], is_last: bool) -> RecurrentCall:
        """The kernels' argument for the rows of this text: from row `first` of the call on, after `past` tokens.

        Accepted nodes are part of the past. `is_last` is true unless more decided tokens follow in the next call.
        """
        assert past == self.num_read + len(self.accepted), "rows continue what was read"
        self._reserve_nodes(len(parents))
        marks = self._snapshot_positions(past, past + decided, is_last)
        self.in_call = True
        return RecurrentCall(self, first, past, decided, parents, {position: self._new_states() for position in marks})

    def _reserve_nodes(self, count: int) -> None:
        """Make room for the inputs of more nodes; a call reads those of accepted ones first."""
        if self.inputs.numel() < count * self.sizes.node:
            old, self.inputs = self.inputs, torch.empty(max(MIN_NODES, count) * self.sizes.node, dtype=torch.uint8)
            self.inputs[: old.numel()] = old

    def _snapshot_positions(self, past: int, end: int, is_last: bool) -> list[int]:
        """Where a call leaves snapshots: every 1,024 tokens, and near the end of a prompt.

        One token before the end is where the same prompt and a longer one continue: the last decided token is always
        read again. Templates may render the end of a prompt differently when an answer follows it (empty thoughts), so
        one is left a little earlier as well. A draft model's text goes back to where its drafts began.
        """
        wanted = set(range(-(-(past + 1) // SNAPSHOT_INTERVAL) * SNAPSHOT_INTERVAL, end + 1, SNAPSHOT_INTERVAL))
        if is_last and end - past > 1:
            is_draft = self.went_back and end - past < MIN_PROMPT
            wanted |= {end} if is_draft else {end - distance for distance in END_DISTANCES if end - distance > past}
        return sorted(wanted - set(self.snapshots))

    def keep_snapshots(self, new: dict[int, Tensor]) -> None:
        """Add snapshots, and drop old ones: the last two near ends of prompts stay, and a few at equal intervals."""
        snapshots, interval = dict(sorted((self.snapshots | new).items())), SNAPSHOT_INTERVAL
        while sum(position % interval == 0 for position in snapshots) > MAX_INTERVALS:
            interval *= 2
        ends = [position for position in snapshots if position % SNAPSHOT_INTERVAL][-len(END_DISTANCES) :]
        self.snapshots = {at: states for at, states in snapshots.items() if at % interval == 0 or at in ends}


class RecurrentCall:
    """One text's argument of the recurrent layers' kernels in a call; `end` when the kernels have run."""

    def __init__(
        self, cache: HybridKVCache, first: int, past: int, decided: int, parents: Sequence[int], new: dict[int, Tensor]
    ) -> None:
        self.cache, self.end_position, self.new_snapshots = cache, past + decided, new
        self.arrays = (
            np.array(parents, dtype=np.int32), np.array(cache.accepted, dtype=np.int32),
            np.array([position - past for position in new], dtype=np.int64),
            np.array([states.data_ptr() for states in new.values()], dtype=np.uint64),
        )  # fmt: skip
        pointers = dict(zip(("parents", "accepted", "marks", "copies"), map(native.address, self.arrays), strict=True))
        self.struct = structs.RecurrentText(
            states=cache.states.data_ptr(), inputs=cache.inputs.data_ptr(), first=first, decided=decided,
            nodes=len(parents), num_accepted=len(cache.accepted), num_marks=len(new),
            node_bytes=cache.sizes.node, **pointers,
        )  # fmt: skip

    @property
    def address(self) -> int:
        return ctypes.addressof(self.struct)

    def end(self) -> None:
        """Note that all layers have read the rows."""
        cache = self.cache
        cache.num_read, cache.accepted, cache.in_call = self.end_position, [], False
        cache.keep_snapshots(self.new_snapshots)
