"""Random numbers of a training step as a function of (seed, stream, step), so that a resumed run is identical."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np


def seeded_generator(seed: int, stream: str, step: int = 0) -> np.random.Generator:
    """Philox 4×64 keyed by all three (Salmon et al. 2011); different keys have different streams."""
    digest = blake2b(f"{int(seed)}/{stream}/{int(step)}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype="<u8")))
