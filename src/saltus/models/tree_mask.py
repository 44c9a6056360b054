"""Compute which nodes of a tree each node attends to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8


def ancestor_mask(parents: Sequence[int]) -> UInt8[np.ndarray, "nodes nodes"]:
    """mask[i, j] is 1 if node j is node i or an ancestor of it. `parents[i] < i`; −1 is none."""
    mask = np.eye(len(parents), dtype=np.uint8)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask
