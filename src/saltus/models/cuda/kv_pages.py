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
from saltus.models.cuda.host_copies import to_device

PADDING_PAGE = 0  # padding rows write their keys and values to its first slot; no text has it
MIN_PAGES = 64  # of a pool, once a text needs one
FIRST_SHARE = 0.1  # of a GPU's free memory, for the first buffers: graphs are captured anew when buffers move
MAX_FIRST_PAGES = 1024  # of a GPU's first buffers


def gpu_bytes_for_texts(pool: KVPagePool, device: torch.device) -> int:
    """What keys and values may take of a GPU where the weights are: half of what is free or the pool's.

    The rest is for pages that a pool has beyond those and for its old buffers while it grows, for graphs and for texts
    that are kept.
    """
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return (free + sum(each.nbytes for each in pool.buffers)) // 2


@dataclass
class KVPagePool:
    """Keys and values of all texts: slots i · page_size and on are those of page i.

    Layers whose keys and values are alike share two buffers, [layers, slots, kv_heads, dim]; most models have no
    others. Slots that no text has written to are 0; what a former text left may not be finite.
    """

    num_layers: int
    page_size: int  # positions
    num_pages: int = 1
    buffers: list[Tensor] = field(default_factory=list)  # keys and values of some layers, those of others …
    places: Sequence[tuple[int, int]] = ()  # of each layer: which pair of buffers, and where in it
    free_pages: list[int] = field(default_factory=list)
    graphs: dict[Any, Any] = field(default_factory=dict)  # CUDA graphs over these buffers; dropped when they move

    def allocate(self, pairs: Sequence[tuple[Tensor, Tensor]], places: Sequence[tuple[int, int]] | None = None) -> None:
        """Allocate buffers for layers with such keys and values, unless they exist. Errors: out of memory.

        Each is [kv_heads, rows, dim]; the number of rows says nothing. `places`: of each layer, which pair it has, and
        its place among the layers that do; without it there is one pair.
        """
        if self.buffers:
            return
        self.places = places or [(0, layer) for layer in range(self.num_layers)]
        layers = [1 + max(at for other, at in self.places if other == pair) for pair in range(len(pairs))]
        rows = [(x.transpose(0, 1), count) for pair, count in zip(pairs, layers, strict=True) for x in pair]
        num_pages = max(self.num_pages, self._first_pages(rows))
        self.buffers = [self._zeros(x, count, num_pages) for x, count in rows]
        self._add_pages(num_pages)

    def of_layer(
        self, layer: int
    ) -> tuple[Float[Tensor, "slots kv_heads dim"], Float[Tensor, "slots kv_heads value_dim"]]:
        """Where the keys and values of a layer are; those of several layers may be the same."""
        pair, place = self.places[layer]
        return self.buffers[2 * pair][place], self.buffers[2 * pair + 1][place]

    def _first_pages(self, rows: Sequence[tuple[Tensor, int]]) -> int:
        """How many pages the first buffers on a GPU should have; 0 elsewhere, where nothing holds their addresses."""
        device = rows[0][0].device
        if device.type != "cuda":
            return 0
        page = self.page_size * sum(x[0].nbytes * layers for x, layers in rows)
        free, _ = torch.cuda.mem_get_info(device)
        return min(int(FIRST_SHARE * free) // page, MAX_FIRST_PAGES)

    def take_pages(self, count: int) -> list[int]:
        """Remove pages from the free ones; the pool grows if there are too few. Errors: out of memory."""
        missing = count - len(self.free_pages)
        if missing > 0:
            self._grow(max(self.num_pages + missing, self.num_pages * 3 // 2, MIN_PAGES))
        return [self.free_pages.pop() for _ in range(count)]  # one by one: texts may end in other threads

    def copy_slots(self, destinations: Int[np.ndarray, "copies"], sources: Int[np.ndarray, "copies"]) -> None:
        """Copy slots of every layer. Sources are read before destinations are written."""
        if self.buffers and len(sources):
            to, of = to_device(np.stack([destinations, sources]), self.buffers[0].device)
            for buffer in self.buffers:
                buffer.index_copy_(1, to, buffer.index_select(1, of))

    def _grow(self, num_pages: int) -> None:
        self.graphs.clear()
        for number, buffer in enumerate(self.buffers):  # one after the other, so that less memory is held at once
            self.buffers[number] = self._resized(buffer, num_pages)
        self._add_pages(num_pages)

    def _add_pages(self, num_pages: int) -> None:
        self.free_pages.extend(range(num_pages - 1, self.num_pages - 1, -1))
        self.num_pages = num_pages

    def _resized(self, old: Tensor, num_pages: int) -> Tensor:
        if old.shape[1] >= num_pages * self.page_size:
            return old
        new = self._zeros(old[0], len(old), num_pages)
        new[:, : old.shape[1]] = old
        return new

    def _zeros(self, like: Tensor, layers: int, num_pages: int) -> Tensor:
        return like.new_zeros(layers, num_pages * self.page_size, *like.shape[1:])


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
        """Those of all texts, of the first layer and those alike; None before the first call."""
        return self.pool.buffers[0] if self.pool.buffers else None

    @property
    def values(self) -> Tensor | None:
        """Those of all texts, of the first layer and those alike; None before the first call."""
        return self.pool.buffers[1] if self.pool.buffers else None

    @property
    def bytes_per_token(self) -> int:
        """What a token takes, once there are buffers."""
        return sum(each.nbytes // each.shape[1] for each in self.pool.buffers)

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

    def read(self, span: slice) -> tuple[Float[Tensor, "1 1 tokens numbers"], Float[Tensor, "1 1 tokens numbers_"]]:
        """A copy of the keys and values of some of `tokens`, those of all layers beside each other."""
        assert self.keys is not None and not self.pending_copies
        slots = torch.from_numpy(self.slots(np.arange(span.start, span.stop))).to(self.keys.device)
        rows = [each.index_select(1, slots).transpose(0, 1).flatten(1) for each in self.pool.buffers]
        return torch.cat(rows[::2], 1)[None, None], torch.cat(rows[1::2], 1)[None, None]

    @torch.inference_mode()  # as the calls that write to the pool
    def fill(
        self,
        tokens: Int[np.ndarray, "tokens"],
        keys: Float[Tensor, "1 1 tokens numbers"],
        values: Float[Tensor, "1 1 tokens numbers_"],
    ) -> None:
        """Let an empty cache hold these tokens, whose keys and values `read` gave.

        Errors: out of memory; the cache stays empty.
        """
        self.reserve(len(tokens))
        assert self.keys is not None
        slots = torch.from_numpy(self.slots(np.arange(len(tokens)))).to(self.keys.device)
        for which, rows in enumerate((keys, values)):
            buffers = self.pool.buffers[which::2]
            sizes = [each.nbytes // each.itemsize // each.shape[1] for each in buffers]
            for buffer, new in zip(buffers, rows[0, 0].split(sizes, 1), strict=True):
                layers, _, *of_layer = buffer.shape
                buffer.index_copy_(1, slots, new.unflatten(1, (layers, *of_layer)).transpose(0, 1))
        self.token_history.tokens = tokens

    def forget(self) -> None:
        """Keep the pages, but nothing of what they hold."""
        self.token_history, self.pending_copies = KVCache(), []
