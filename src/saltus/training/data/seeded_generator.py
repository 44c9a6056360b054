"""Random numbers of a training step as a function of (seed, stream, step), so that a resumed run is identical."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np


def seeded_generator(seed: int, stream: str, step: int = 0) -> np.random.Generator:
    """Philox 4×64 keyed by all three (Salmon et al. 2011); different keys have different streams."""
    digest = blake2b(f"{int(seed)}/{stream}/{int(step)}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype="<u8")))


class ShareOfDraws(np.random.Generator):
    """Draws for all texts of a batch, of which it returns those for some: what one process would draw for them."""

    def __init__(self, generator: np.random.Generator, num_texts: int, rows: slice) -> None:
        super().__init__(generator.bit_generator)
        self.num_texts, self.rows = num_texts, rows

    def random(self, size: tuple[int, ...]) -> np.ndarray:  # type: ignore[override]
        """Uniform numbers; the first axis is that of the texts."""
        return super().random((self.num_texts, *size[1:]))[self.rows]

    def beta(self, a: float, b: float, size: tuple[int, ...]) -> np.ndarray:  # type: ignore[override]
        """Beta(a, b); the first axis is that of the texts."""
        return super().beta(a, b, (self.num_texts, *size[1:]))[self.rows]
