"""Weights of 8-bit floats (E4M3, Micikevicius et al. 2022) with a scale for the tensor, an output or a block of it.

As DeepSeek V3 and Qwen3-FP8 have them: `weight_scale_inv` [out / 128, in / 128] multiplies blocks of 128 × 128.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from saltus.loading.quantised_numbers import ScaledFloats, required

STACKS = ("gate_up_proj", "down_proj")  # of experts
PARTS = dict.fromkeys(("weight_scale_inv", "weight_scale"), "weight") | {
    f"{stack}_{scale}": stack for stack in STACKS for scale in ("scale_inv", "scale")
}
FLOATS = (torch.float8_e4m3fn,)
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


def read(settings: Mapping[str, Any], name: str, parts: Mapping[str, Tensor]) -> ScaledFloats:
    """See saltus.loading.quantised."""
    own = name.rpartition(".")[2]
    if own not in parts:
        raise ValueError(f"lacks its {own}")
    values = required(parts, own, FLOATS, parts[own].ndim)
    scales = next((part for part in parts if part != own), f"{own}_scale_inv")
    return scaled(
        values, required(parts, scales, SCALES, parts[scales].ndim if scales in parts else 0), block_of(settings)
    )


def block_of(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """The outputs and inputs of a block. Errors: ValueError."""
    block = settings.get("weight_block_size")
    if block is None:
        return None
    if not isinstance(block, list) or [type(each) for each in block] != [int, int] or min(block) < 1:
        raise ValueError(f"has weight_block_size {block!r}, which must be two numbers above 0")
    return block[0], block[1]


def scaled(values: Tensor, scales: Tensor, block: tuple[int, int] | None) -> ScaledFloats:
    """Values [.., out, in] with scales of all, of outputs [.., out, 1] or of blocks. Errors: ValueError."""
    if values.ndim < 2:
        raise ValueError(f"has {scales.numel()} scales of {list(values.shape)}")
    scales = scales.float()
    *stack, outputs, inputs = values.shape
    if scales.numel() == 1:
        return ScaledFloats(values, scales.flatten().expand(*stack, 1, 1), (outputs, inputs))
    if scales.ndim == values.ndim - 1:
        scales = scales[..., None]
    rows = scales.shape[-2] if scales.ndim > 1 else 0  # a stack of gates and values may have one for each half
    is_even = rows in (outputs, 1) or (block is None and rows > 0 and outputs % rows == 0)
    if scales.shape[-1] == 1 and is_even and list(scales.shape[:-2]) == stack:
        return ScaledFloats(values, scales, (outputs // rows, inputs))
    if block is None:
        raise ValueError(f"has scales {list(scales.shape)} of {list(values.shape)}, and no weight_block_size")
    if list(scales.shape) != [*stack, -(-outputs // block[0]), -(-inputs // block[1])]:
        raise ValueError(
            f"has scales {list(scales.shape)}, not one for each {block[0]} × {block[1]} of {list(values.shape)}"
        )
    return ScaledFloats(values, scales, block)
