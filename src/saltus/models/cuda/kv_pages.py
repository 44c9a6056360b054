"""Keep keys and values of all texts in pages of one pool, and say which pages hold those of a text.

CUDA graphs hold addresses. Those of the pool belong to no text, so a graph serves every text.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from saltus.models.cpu.kv_cache import KVCache

PADDING_PAGE = 0  # padding rows write their keys and values to its first slot; no text has it
MIN_PAGES = 64  # of a pool, once a text needs one
FIRST_SHARE = 0.1  # of a GPU's free memory, for the first buffers: graphs are captured anew when buffers move
MAX_FIRST_PAGES = 1024  # of a GPU's first buffers


@dataclass
class KVPagePool:
    """Keys and values of all texts, [layers, slots, kv_heads, dim]: slots i · page_size and on are those of page i.

    All values are finite, also in pages that no text has written to.
    """

    num_layers: int
    page_size: int  # positions
    num_pages: int = 1
    keys: Tensor | None = None
    values: Tensor | None = None
    free_pages: list[int] = field(default_factory=list)
    graphs: dict[Any, Any] = field(default_factory=dict)  # CUDA graphs over these buffers; dropped when they move

    def allocate(
        self, key: Float[Tensor, "kv_heads rows dim"], value: Float[Tensor, "kv_heads rows value_dim"]
    ) -> None:
        """Allocate buffers for layers with such keys and values, unless they exist. Errors: out of memory."""
        if self.keys is None or self.values is None:
            rows = [x.transpose(0, 1) for x in (key, value)]
            num_pages = max(self.num_pages, self._first_pages(rows))
            self.keys, self.values = (self._zeros(x, num_pages) for x in rows)
            self._add_pages(num_pages)

    def _first_pages(self, rows: Sequence[Tensor]) -> int:
        """How many pages the first buffers on a GPU should have; 0 elsewhere, where nothing holds their addresses."""
        if rows[0].device.type != "cuda":
            return 0
        page = self.num_layers * self.page_size * sum(x[0].nbytes for x in rows)
        free, _ = torch.cuda.mem_get_info(rows[0].device)
        return min(int(FIRST_SHARE * free) // page, MAX_FIRST_PAGES)

    def take_pages(self, count: int) -> list[int]:
        """Remove pages from the free ones; the pool grows if there are too few. Errors: out of memory."""
        missing = count - len(self.free_pages)
        if missing > 0:
            self._grow(max(self.num_pages + missing, self.num_pages * 3 // 2, MIN_PAGES))
        return [self.free_pages.pop() for _ in range(count)]  # one by one: texts may end in other threads

    def copy_slots(self, destinations: Int[np.ndarray, "copies"], sources: Int[np.ndarray, "copies"]) -> None:
        """Copy slots of every layer. Sources are read before destinations are written."""
        for buffer in (self.keys, self.values):
            if buffer is not None and len(sources):
                to, of = torch.from_numpy(np.stack([destinations, sources])).to(buffer.device)
                buffer.index_copy_(1, to, buffer.index_select(1, of))

    def _grow(self, num_pages: int) -> None:
        self.graphs.clear()
        self.keys = self._resized(self.keys, num_pages)  # one after the other, so that less memory is held at once
        self.values = self._resized(self.values, num_pages)
        self._add_pages(num_pages)

    def _add_pages(self, num_pages: int) -> None:
        self.free_pages.extend(range(num_pages - 1, self.num_pages - 1, -1))
        self.num_pages = num_pages

    def _resized(self, old: Tensor | None, num_pages: int) -> Tensor | None:
        if old is None or old.shape[1] >= num_pages * self.page_size:
            return old
        new = self._zeros(old[0], num_pages)
        new[:, : old.shape[1]] = old
        return new

    def _zeros(self, like: Tensor, num_pages: int) -> Tensor:
        return like.new_zeros(self.num_layers, num_pages * self.page_size, *like.shape[1:])


@dataclass
class FixedShapeKVCache:
    """The tokens of one text in the cache, and its pages, which are free again when the cache is gone.

    Its entries are numbered as in other caches: entry p is decided token p, and node i of a tree after n decided
    tokens is entry n + i until the next call.
    """

    pool: KVPagePool
    token_history: KVCache = field(default_factory=KVCache)  # tokens and tree, without buffers
    pages: list[int] = field(default_factory=list)
    pending_copies: list[tuple[int, int]] = field(default_factory=list)  # (destination, source) of accepted nodes
    long_angles: bool | None = field(default=None, init=False)  # of LongRoPE, that keys are rotated by

    def __post_init__(self) -> None:
        weakref.finalize(self, self.pool.free_pages.extend, self.pages)

    @property
    def tokens(self) -> np.ndarray:
        return self.token_history.tokens

    @property
    def keys(self) -> Tensor | None:
        """Those of all texts; None before the first call."""
        return self.pool.keys

    @property
    def values(self) -> Tensor | None:
        """Those of all texts; None before the first call."""
        return self.pool.values

    @property
    def bytes_per_token(self) -> int:
        """What a token takes, once there are buffers."""
        return sum(each.nbytes // each.shape[1] for each in (self.keys, self.values) if each is not None)

    def reuse_prefix(self, tokens: Int[np.ndarray, "tokens"]) -> int:
        """How many of the decided tokens are in the cache; the accepted branch is kept."""
        if self.token_history.pending_tree is not None:
            base = len(self.token_history.tokens)
            nodes = self.token_history.pending_tree.matching_nodes(tokens[base:])
            self.pending_copies += [(base + depth, base + node) for depth, node in enumerate(nodes) if node != depth]
        return self.token_history.reuse_prefix(tokens)

    def reserve(self, num_entries: int) -> None:
        """Take pages for so many entries. Errors: out of memory; the cache stays as it was."""
        missing = -(-num_entries // self.pool.page_size) - len(self.pages)
        if missing > 0:
            self.pages += self.pool.take_pages(missing)

    def slots(self, entries: Int[np.ndarray, "*shape"]) -> Int[np.ndarray, "*shape"]:
        """The slots of the pool that hold these entries."""
        page, offset = np.divmod(entries, self.pool.page_size)
        return np.array(self.pages, dtype=np.int64)[page] * self.pool.page_size + offset

    def read(
        self, span: slice
    ) -> tuple[Float[Tensor, "layers kv_heads tokens dim"], Float[Tensor, "layers kv_heads tokens value_dim"]]:
        """A copy of the keys and values of some of `tokens`."""
        assert self.keys is not None and self.values is not None and not self.pending_copies
        slots = torch.from_numpy(self.slots(np.arange(span.start, span.stop))).to(self.keys.device)
        keys, values = (buffer.index_select(1, slots).transpose(1, 2) for buffer in (self.keys, self.values))
        return keys.contiguous(), values.contiguous()

    @torch.inference_mode()  # as the calls that write to the pool
    def fill(
        self,
        tokens: Int[np.ndarray, "tokens"],
        keys: Float[Tensor, "layers kv_heads tokens dim"],
        values: Float[Tensor, "layers kv_heads tokens value_dim"],
    ) -> None:
        """Let an empty cache hold these tokens. Errors: out of memory; the cache stays empty."""
        self.pool.allocate(keys[0], values[0])
        self.reserve(len(tokens))
        assert self.keys is not None and self.values is not None
        slots = torch.from_numpy(self.slots(np.arange(len(tokens)))).to(self.keys.device)
        for buffer, new in ((self.keys, keys), (self.values, values)):
            buffer.index_copy_(1, slots, new.transpose(1, 2))
        self.token_history.tokens = tokens

    def forget(self) -> None:
        """Keep the pages, but nothing of what they hold."""
        self.token_history, self.pending_copies = KVCache(), []
