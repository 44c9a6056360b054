"""Choose the texts of a batch: of similar lengths, so that there is little padding, and every text equally likely."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

LENGTH_JITTER = 24  # tokens of noise on lengths before texts are sorted by length


def sample_similar_lengths(
    lengths: Int[np.ndarray, "texts"], count: int, generator: np.random.Generator
) -> Int[np.ndarray, "count"]:
    """Indices of different texts, neighbours in the order of their jittered lengths, which wraps around."""
    order = np.argsort(lengths + generator.uniform(0, LENGTH_JITTER, len(lengths)))
    first = int(generator.integers(len(lengths)))
    return order[(first + np.arange(count)) % len(lengths)]
