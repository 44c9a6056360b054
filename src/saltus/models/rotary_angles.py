"""Ask a rotary module of Transformers for the angles of positions."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def angles_of_positions(rotary: Any, hidden: Tensor, positions: Tensor, layer_type: str | None = None) -> Any:
    """Cosines and sines [1, rows, dims], or complex numbers, of positions [1, rows], in the dtype of hidden [1, ..].

    A module with sections for time, height and width (Qwen3.5) gets positions of all three, which are the same in a
    text: releases of Transformers before 5.24 take nothing else.
    """
    if hasattr(rotary, "mrope_section"):
        positions = positions.expand(3, *positions.shape)
    kind = {} if layer_type is None else {"layer_type": layer_type}
    return rotary(hidden, position_ids=positions, **kind)
