"""Say how the matrices of a model are stored and multiplied."""

from __future__ import annotations

from typing import Any

from saltus.kernels.packed_blocks import Arithmetic
from saltus.kernels.packed_weight import PackedWeight


def describe_weights(model: Any) -> str:
    """How matrices are stored, the format of most bytes first, and multiplied: "Q4_1, Q8_0, int8 activations"."""
    sizes: dict[str, int] = {}
    for weight in model.parameters():
        if weight.ndim >= 2:
            format = getattr(weight, "format", None)  # on a GPU another class has it, too
            name = str(weight.dtype).removeprefix("torch.") if format is None else format.name
            sizes[name] = sizes.get(name, 0) + weight.nbytes
    return ", ".join(sorted(sizes, key=lambda name: -sizes[name])) + (
        ", int8 activations" if uses_integers(model) else ""
    )


def is_packed(model: Any) -> bool:
    """True if a model has packed matrices, on a CPU or a GPU."""
    return any(getattr(weight, "format", None) is not None for weight in model.parameters())


def uses_integers(model: Any) -> bool:
    """True if a model multiplies activations of 8 bits."""
    return arithmetic_of(model) == "int8"


def arithmetic_of(model: Any) -> Arithmetic | None:
    """How a model multiplies packed weights (F16 always by "bf16"); None if it has none."""
    found = {weight.arithmetic for weight in model.parameters() if isinstance(weight, PackedWeight)}
    return "int8" if "int8" in found else "bf16" if found else None
