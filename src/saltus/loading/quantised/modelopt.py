"""Weights as NVIDIA's Model Optimizer (ModelOpt) exports them: floats of 8 bits (FP8), or of 4 bits (NVFP4).

A weight in FP8 has `weight_scale`, of the tensor or of each output. One in NVFP4, `weight` [out, in / 2] of bytes, has
an 8-bit float for each 16 inputs, and `weight_scale_2` of the tensor: both multiply. Older exports say so in
hf_quant_config.json alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from saltus.loading.quantised import fp8
from saltus.loading.quantised.compressed_tensors import four_bit_floats
from saltus.loading.quantised_numbers import required

CHANGES = ("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b")  # of inputs and of outputs, around the product
PARTS = dict.fromkeys(("weight_scale", "weight_scale_2", *CHANGES), "weight")


def read(settings: Mapping[str, Any], name: str, parts: Mapping[str, Tensor]) -> Any:
    """See saltus.loading.quantised."""
    if change := next((part for part in CHANGES if part in parts), None):
        raise ValueError(f"has a {change}, which is not read")
    if "weight" in parts and parts["weight"].dtype in fp8.FLOATS:
        return fp8.read({}, name, {part: tensor for part, tensor in parts.items() if part != "weight_scale_2"})
    if "weight_scale_2" not in parts:
        raise ValueError(f"has numbers of {settings.get('quant_algo')}, of ModelOpt's only FP8 and NVFP4 are read")
    of_all = required(parts, "weight_scale_2", (torch.float32,), parts["weight_scale_2"].ndim)
    return four_bit_floats(parts, "weight", of_all)
