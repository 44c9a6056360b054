"""Keep what recurrent layers remember of texts on a GPU, beside the pages of keys and values.

A state can be continued but not cut. It is kept after decided tokens only, in a *slot* of a pool; of a tree's nodes
there are their inputs, which the next call applies where they were accepted. Where a text differs from what was read,
the newest *snapshot* before that place is continued, which is a slot, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from saltus.models.cuda.kv_pages import FixedShapeKVCache

MIN_SLOTS = 8
NODES = 32  # of a block, as texts take them
SNAPSHOT_INTERVAL = 1024  # tokens, at least
MAX_SNAPSHOTS = 4  # of a text
MIN_PROMPT = 32  # tokens that a call reads; a draft model's text that has gone back may read fewer


class StateShape(NamedTuple):
    """What a recurrent layer keeps: the inputs of a convolution's window, and perhaps a state of each head."""

    taps: int  # inputs before a row that it reads
    channels: int  # of the convolution
    kept: int  # numbers of a node: its inputs, beside what the convolution gives
    state: tuple[int, ...] = ()  # [heads, keys, values]


@dataclass
class StatePool:
    """The states of all texts, [layers, slots, …], and nodes' inputs [layers, nodes, …].

    Rows that pad a call change slot 0, which no text has.
    """

    num_layers: int
    shape: StateShape
    dtype: torch.dtype
    device: torch.device
    moved: Callable[[], None]  # called where buffers move, whose addresses graphs hold
    windows: Tensor = field(init=False)
    states: Tensor = field(init=False)  # in float32
    kept: Tensor = field(init=False)
    convolved: Tensor = field(init=False)
    free_slots: list[int] = field(default_factory=list, init=False)
    free_blocks: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.windows = self._zeros(1, self.shape.taps, self.shape.channels)
        self.states = self._zeros(1, *self.shape.state, dtype=torch.float32)
        self.kept, self.convolved = self._zeros(0, self.shape.kept), self._zeros(0, self.shape.channels)

    def _zeros(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(self.num_layers, *sizes, dtype=dtype or self.dtype, device=self.device)

    @property
    def slot_bytes(self) -> int:
        """What a text's states take."""
        return sum(each.nbytes // each.shape[1] for each in (self.windows, self.states))

    @property
    def node_bytes(self) -> int:
        """What the inputs of a node take."""
        numbers = self.shape.kept + (self.shape.channels if self.shape.state else 0)
        return self.num_layers * numbers * self.dtype.itemsize

    def take_slot(self, source: int | None = None) -> int:
        """A slot with a copy of another one, or with zeros. Errors: out of memory."""
        if not self.free_slots:
            have = self.windows.shape[1]
            self.windows, self.states = self._grown([self.windows, self.states], max(MIN_SLOTS, have * 3 // 2))
            self.free_slots += range(self.windows.shape[1] - 1, have - 1, -1)
        slot = self.free_slots.pop()
        self.copy_slot(slot, source)
        return slot

    @torch.inference_mode()
    def copy_slot(self, slot: int, source: int | None) -> None:
        """Let a slot have what another has, or zeros."""
        for each in (self.windows, self.states):
            if source is None:
                each[:, slot].zero_()
            else:
                each[:, slot] = each[:, source]

    def take_block(self) -> int:
        """A block for NODES nodes. Errors: out of memory."""
        if not self.free_blocks:
            have = self.kept.shape[1] // NODES
            count = max(MIN_SLOTS, have * 3 // 2)
            self.kept, *others = self._grown([self.kept, *[self.convolved] * bool(self.shape.state)], count * NODES)
            self.convolved = others[0] if others else self.convolved
            self.free_blocks += range(count - 1, have - 1, -1)
        return self.free_blocks.pop()

    def _grown(self, buffers: Sequence[Tensor], count: int) -> list[Tensor]:
        self.moved()
        grown = []
        for old in buffers:
            new = self._zeros(count, *old.shape[2:], dtype=old.dtype)
            new[:, : old.shape[1]] = old
            grown.append(new)
        return grown


@dataclass
class StateKVCache(FixedShapeKVCache):
    """Also the states after the first `num_read` tokens; those after them are `accepted` nodes of the call before."""

    states: StatePool = field(kw_only=True)
    slot: int = field(init=False)
    owned: list[int] = field(default_factory=list, init=False)  # slots: its own, and those of snapshots
    blocks: list[int] = field(default_factory=list, init=False)  # of nodes
    num_read: int = field(default=0, init=False)
    accepted: list[int] = field(default_factory=list, init=False)  # nodes of the pool
    snapshots: dict[int, int] = field(default_factory=dict, init=False)  # slots by position
    went_back: bool = field(default=False, init=False)  # to a snapshot, as a draft model's texts do
    is_lost: bool = field(default=False, init=False)  # a call failed, and states are those of other tokens

    def __post_init__(self) -> None:
        super().__post_init__()
        self.slot = self.states.take_slot()
        self.owned.append(self.slot)
        weakref.finalize(self, self.states.free_slots.extend, self.owned)
        weakref.finalize(self, self.states.free_blocks.extend, self.blocks)

    @property
    def num_bytes(self) -> int:
        """Of its pages, its states and snapshots."""
        entries = len(self.pages) * self.pool.page_size
        return entries * self.bytes_per_token + len(self.owned) * self.states.slot_bytes

    def reuse_prefix(self, tokens: Int[np.ndarray, "tokens"]) -> int:
        """How many of the decided tokens are in the cache; the accepted branch is kept."""
        tree = self.token_history.pending_tree
        if tree is not None:
            nodes = tree.matching_nodes(tokens[len(self.token_history.tokens) :])
            self.accepted = [self.node_place(node) for node in nodes]
        count = super().reuse_prefix(tokens)
        if self.is_lost or count < self.num_read:
            return self._go_back(count)
        self.accepted = self.accepted[: count - self.num_read]
        return count

    def _go_back(self, limit: int) -> int:
        """Continue the newest snapshot of at most `limit` tokens, or begin anew; returns how many tokens it has."""
        if self.is_lost:
            limit = 0
        for position in [position for position in self.snapshots if position > limit]:
            self._drop_snapshot(position)
        self.num_read = max(self.snapshots, default=0)
        self.states.copy_slot(self.slot, self.snapshots.get(self.num_read))
        self.token_history.tokens, self.accepted = self.token_history.tokens[: self.num_read], []
        self.pending_copies = []
        self.went_back, self.is_lost = True, False
        return self.num_read

    def node_place(self, node: int) -> int:
        """Where the pool keeps the inputs of a node."""
        block, place = divmod(node, NODES)
        return self.blocks[block] * NODES + place

    def reserve_nodes(self, count: int) -> None:
        """Have room for the inputs of so many nodes. Errors: out of memory."""
        while len(self.blocks) * NODES < count:
            self.blocks.append(self.states.take_block())

    def note_read(self, count: int) -> None:
        """Note that a call applied what was accepted, and read so many tokens after it."""
        self.num_read, self.accepted = self.num_read + len(self.accepted) + count, []

    def keep_snapshot(self, num_tokens: int, is_end: bool) -> None:
        """Perhaps keep a copy after a call that read so many tokens; `is_end`: all but the last one of a prompt."""
        is_draft = self.went_back and 1 < num_tokens < MIN_PROMPT
        new = self.num_read - max(self.snapshots, default=0)
        if not new or not (is_draft or new >= SNAPSHOT_INTERVAL or (is_end and new >= MIN_PROMPT)):
            return
        while len(self.snapshots) >= MAX_SNAPSHOTS:
            positions = [0, *sorted(self.snapshots)]
            middle = range(1, len(positions) - 1)  # the newest one stays
            nearest = min(middle, key=lambda at: positions[at + 1] - positions[at - 1])
            self._drop_snapshot(positions[nearest])
        self.snapshots[self.num_read] = slot = self.states.take_slot(self.slot)
        self.owned.append(slot)

    def _drop_snapshot(self, position: int) -> None:
        slot = self.snapshots.pop(position)
        self.owned.remove(slot)
        self.states.free_slots.append(slot)

    def forget(self) -> None:
        """Keep pages and slots, but nothing of what they hold."""
        super().forget()
        self.accepted, self.is_lost = [], True
