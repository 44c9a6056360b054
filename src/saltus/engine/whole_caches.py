"""Keep KV caches that cannot be cut in pieces, each for one later text that begins alike."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from saltus.engine.prefix_path import common_prefix_length
from saltus.models.cpu.kv_cache import KVCache
from saltus.models.cuda.state_pages import StateKVCache

MAX_CACHES = 4


@dataclass(frozen=True, eq=False)
class _Kept:
    network_name: str
    kv_cache: KVCache | StateKVCache
    prompt_length: int
    num_bytes: int


@dataclass
class WholeCaches:
    """The latest caches, at most four; a text takes one with all of its prompt, such as the next turn of a talk."""

    _kept: list[_Kept] = field(default_factory=list, init=False)

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self._kept)

    @property
    def network_names(self) -> set[str]:
        return {each.network_name for each in self._kept}

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()

    def keep(self, network_name: str, kv_cache: KVCache | StateKVCache, prompt_length: int) -> None:
        """Keep the cache of a text that has ended."""
        self._kept.append(_Kept(network_name, kv_cache, prompt_length, _num_bytes(kv_cache)))
        del self._kept[:-MAX_CACHES]

    def drop_oldest(self) -> None:
        """Forget the cache that was kept first."""
        del self._kept[0]

    def take(self, network_name: str, tokens: np.ndarray) -> KVCache | StateKVCache | None:
        """The cache that shares most with a prompt, cut to what it shares; it is no longer kept."""
        best, most = None, 0
        for each in self._kept:
            shared = common_prefix_length(each.kv_cache.tokens, tokens)
            if each.network_name == network_name and shared >= max(each.prompt_length, most + 1):
                best, most = each, shared
        if best is None:
            return None
        self._kept.remove(best)
        if isinstance(best.kv_cache, StateKVCache):
            best.kv_cache.reuse_prefix(tokens)
        else:
            best.kv_cache.reuse_prefix(tokens, 0)
        return best.kv_cache


def _num_bytes(kv_cache: KVCache | StateKVCache) -> int:
    if isinstance(kv_cache, StateKVCache):
        return kv_cache.num_bytes
    pairs = [(kv_cache.keys, kv_cache.values), *kv_cache.odd_layers.values()]
    return sum(tensor.nbytes for pair in pairs for tensor in pair if tensor is not None)
