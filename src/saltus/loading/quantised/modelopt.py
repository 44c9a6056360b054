"""Weights as NVIDIA's Model Optimizer (ModelOpt) exports them: integers of 8 or 4 bits, floats of 8 or 4 bits.

Their dtypes say which (modelopt/torch/export): `weight` in FP8 has `weight_scale`, of the tensor or of each output, in
MXFP8 the exponents plus 127 of powers of two, one for each 32 inputs; in INT8 (W8A16, W8A8_SQ_PER_CHANNEL) one of each
output. Bytes [out, in / 2] are NVFP4, with an 8-bit float for each 16 inputs and `weight_scale_2` of the tensor, which
both multiply, or MXFP4. Bytes [out / 2, in] are INT4 (W4A16_AWQ): two outputs beside each other, the first in the low
half, signed, with a scale for each group of inputs. Where the inputs are multiplied by a `pre_quant_scale`, the weights
are instead. Weights that were left in the form of their source, as layers for multi-token prediction are, have
`weight_scale_inv`: of blocks of 128 × 128 (DeepSeek V3), or exponents as in MXFP8. Older exports say so in
hf_quant_config.json alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from saltus.loading.quantised import fp8
from saltus.loading.quantised.compressed_tensors import four_bit_floats, microscaled_floats
from saltus.loading.quantised.gptq import FLOATS
from saltus.loading.quantised_numbers import ScaledIntegers, check_groups, check_shape, required

CHANGES = ("svdquant_lora_a", "svdquant_lora_b")  # of outputs, beside the product
PARTS = dict.fromkeys(("weight_scale", "weight_scale_inv", "weight_scale_2", "pre_quant_scale", *CHANGES), "weight")
SOURCE_BLOCK = [128, 128]  # of scales that the source had; the configuration does not say it


def read(settings: Mapping[str, Any], name: str, parts: Mapping[str, Tensor]) -> Any:
    """See saltus.loading.quantised."""
    if change := next((part for part in CHANGES if part in parts), None):
        raise ValueError(f"has a {change}, which is not read")
    numbers = _numbers(settings, parts)
    if "pre_quant_scale" not in parts:
        return numbers
    weight = numbers if isinstance(numbers, Tensor) else numbers.expand()
    of_inputs = required(parts, "pre_quant_scale", FLOATS, 1)
    check_shape("pre_quant_scale", of_inputs, weight.shape[1])
    return weight.float() * of_inputs.float()


def _numbers(settings: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Any:
    if "weight" not in parts:
        raise ValueError("lacks its weight")
    weight, of_source = parts["weight"], parts.get("weight_scale_inv")
    scales = parts.get("weight_scale", of_source)
    if weight.dtype in fp8.FLOATS:
        if scales is not None and scales.dtype == torch.uint8:
            return fp8.scaled(weight, scales.view(torch.float8_e8m0fnu), (1, 32))
        block = {} if of_source is None else {"weight_block_size": SOURCE_BLOCK}
        return fp8.read(block, "weight", {"weight": weight} | ({} if scales is None else {"weight_scale": scales}))
    if weight.dtype == torch.int8:
        integers, scales = required(parts, "weight", (torch.int8,), 2), required(parts, "weight_scale", FLOATS, 1)
        check_shape("weight_scale", scales, len(integers))
        return ScaledIntegers(integers, scales[:, None], 8)
    if "weight_scale_2" in parts:
        of_all = required(parts, "weight_scale_2", (torch.float32,), parts["weight_scale_2"].ndim)
        return four_bit_floats(parts, "weight", of_all)
    if weight.dtype == torch.uint8:
        is_microscaled = scales is not None and scales.dtype == torch.uint8
        return microscaled_floats(parts, "weight") if is_microscaled else _four_bit_integers(parts)
    raise ValueError(f"has numbers of {settings.get('quant_algo')}, which are not read")


def _four_bit_integers(parts: Mapping[str, Tensor]) -> ScaledIntegers:
    pairs, scales = required(parts, "weight", (torch.uint8,), 2), required(parts, "weight_scale", FLOATS, 2)
    check_shape("weight_scale", scales, 2 * len(pairs), scales.shape[1])
    check_groups(pairs.shape[1], scales.shape[1])
    halves = torch.stack([pairs & 15, pairs >> 4], 1).flatten(0, 1)
    return ScaledIntegers((halves ^ 8).to(torch.int8) - 8, scales, 4)
