"""Measure how long a call takes by the number of its rows: the controller weighs draft tokens by it."""

from __future__ import annotations

import numpy as np

from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.core.protocols import Network

CALIBRATION_ROWS = (1, 2, 4, 8, 16, 32)  # row counts that are timed


def measure_call_seconds(network: Network) -> dict[int, float]:
    """Seconds of a call by its number of rows, after a short text: the least of three, since noise only adds."""
    kv_cache = network.new_kv_cache()
    vocab = network.forward([ForwardInputs(continuation([0], 1))], [kv_cache])[0].logits.shape[-1]
    canvas = continuation(np.arange(48) % vocab, 2)

    def seconds(rows: int) -> float:
        nodes = np.arange(rows - 1) % vocab
        inputs = ForwardInputs(canvas, tuple(nodes.tolist()), (-1,) * len(nodes))
        return network.forward([inputs], [kv_cache])[0].seconds

    seconds(max(CALIBRATION_ROWS))
    turns = [[seconds(rows) for rows in CALIBRATION_ROWS] for _ in range(3)]
    return dict(zip(CALIBRATION_ROWS, map(min, *turns), strict=True))
