"""gpt-oss's experts in MXFP4 (OCP Microscaling Formats, 2023): 32 floats of 4 bits (E2M1) and a power of two.

A byte of `…_blocks` [experts, out, in / 32, 16] holds two weights beside each other, the first in its low half;
`…_scales` [experts, out, in / 32] are the exponents plus 127. The model has the matrices as [experts, in, out].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from saltus.loading.quantised_numbers import Blocks, check_shape, required, unpack_words

PARTS = {f"{stack}_{part}": stack for stack in ("gate_up_proj", "down_proj") for part in ("blocks", "scales")}


def read(settings: Mapping[str, Any], name: str, parts: Mapping[str, Tensor]) -> Blocks:
    """See saltus.loading.quantised."""
    stack = name.rpartition(".")[2]
    pairs = required(parts, f"{stack}_blocks", (torch.uint8,), 4)
    exponents = required(parts, f"{stack}_scales", (torch.uint8,), 3)
    check_shape(f"{stack}_blocks", pairs, *exponents.shape, 16)
    return Blocks(blocks_of_pairs(pairs, exponents), GGMLQuantizationType.MXFP4, is_transposed=True)


def blocks_of_pairs(pairs: Tensor, exponents: Tensor) -> Tensor:
    """GGUF's blocks [.., bytes of a row]: the exponent, then 16 bytes, each with a weight and the one 16 after it.

    `pairs` are [.., blocks, 16] with weights that stand beside each other, `exponents` [.., blocks].
    """
    weights = unpack_words(pairs, 4)
    halves = weights[..., :16] | weights[..., 16:] << 4
    return torch.cat([exponents[..., None], halves], -1).flatten(-2)
