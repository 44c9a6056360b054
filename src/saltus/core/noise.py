"""Uniform random numbers for each position of a text: a function of (seed, stream, position) only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import ArrayLike

BLOCK = 1024  # positions generated and cached together; a multiple of the four words that one Philox counter gives


@dataclass(frozen=True)
class Noise:
    """The randomness of one text. Streams are independent: "text" picks tokens, "accept/2" verifies sibling 2."""

    seed: int

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}, but must be 0 or more; take its absolute value")

    def uniforms(self, stream: str, positions: ArrayLike | int) -> np.ndarray:
        """Uniforms in [0, 1), float64, in the shape of `positions` (integers ≥ 0)."""
        positions = np.asarray(positions, dtype=np.int64)
        if not positions.size:
            return np.empty(positions.shape)
        first, last = int(positions.min()) // BLOCK, int(positions.max()) // BLOCK
        if first < 0:
            raise ValueError(f"noise was requested at position {positions.min()}, but positions start at 0")
        if first == last:
            return np.asarray(_block(self.seed, stream, first)[positions % BLOCK])
        out = np.empty(positions.shape)
        blocks = positions // BLOCK
        for block in np.unique(blocks):
            here = blocks == block
            out[here] = _block(self.seed, stream, int(block))[positions[here] % BLOCK]
        return out

    def uniform(self, stream: str, position: int | np.integer) -> float:
        """The uniform of one position ≥ 0."""
        block, word = divmod(int(position), BLOCK)
        return float(_block(self.seed, stream, block)[word])


@lru_cache(maxsize=1024)
def _block(seed: int, stream: str, block: int) -> np.ndarray:
    """Philox 4×64 (Salmon et al. 2011) keyed by (seed, stream); word p of its sequence belongs to position p."""
    key = np.frombuffer(blake2b(f"{int(seed)}/{stream}".encode(), digest_size=16).digest(), dtype="<u8")
    words = np.random.Philox(key=key, counter=block * BLOCK // 4).random_raw(BLOCK)
    return (words >> np.uint64(11)) * 2.0**-53
