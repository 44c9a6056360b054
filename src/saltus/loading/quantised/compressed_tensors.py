"""Weights as llm-compressor writes them (compressed-tensors): integers, 8-bit or 4-bit floats, by groups of layers.

`config_groups` says how the layers are stored that its `targets` name: by class, by name or by a pattern `re:…`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from saltus.loading.quantised import fp8
from saltus.loading.quantised.gptq import FLOATS, group_of_inputs, unsigned_groups
from saltus.loading.quantised.mxfp4 import blocks_of_pairs
from saltus.loading.quantised_numbers import (
    WORDS,
    Blocks,
    FourBitFloats,
    ScaledFloats,
    ScaledIntegers,
    check_shape,
    required,
    unpack_words,
)

PARTS = dict.fromkeys(
    ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape", "weight_global_scale"),
    "weight",
)
INTEGERS = (torch.int8, torch.int32, torch.int64)


def read(
    settings: Mapping[str, Any], name: str, parts: Mapping[str, Tensor]
) -> ScaledIntegers | ScaledFloats | FourBitFloats | Blocks:
    """See saltus.loading.quantised."""
    for field in ("sparsity_config", "transform_config"):
        if (given := settings.get(field)) and (not isinstance(given, dict) or given.get("format") != "dense"):
            raise ValueError(f"is stored with a {field}, which is not read")
    group = _group_of(settings, name.rpartition(".")[0])
    form, weights = group.get("format") or settings.get("format"), group.get("weights")
    if form not in READERS:
        raise ValueError(f"is in the format {form}, of compressed-tensors only {', '.join(READERS)} are read")
    if not isinstance(weights, dict):
        raise ValueError("is stored by a group that does not say how (weights)")
    return READERS[form](weights, parts)


def _group_of(settings: Mapping[str, Any], layer: str) -> Mapping[str, Any]:
    """The group of `config_groups` that a layer belongs to: by its name before by its class. Errors: ValueError."""
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ValueError("is stored by config_groups that are no objects")
    if any(layer == name or _fits(layer, name) for name in map(str, settings.get("ignore") or ())):
        raise ValueError("is quantised, but the configuration says that it is not (ignore)")
    targets = [(str(name), group) for group in groups.values() for name in group.get("targets") or ()]
    for chosen in (layer.__eq__, partial(_fits, layer), "Linear".__eq__):  # a name goes before a pattern
        if (group := next((group for name, group in targets if chosen(name)), None)) is not None:
            return group
    raise ValueError("is quantised, but no group of the configuration is for it (targets)")


def _fits(layer: str, pattern: str) -> bool:
    """True if a pattern `re:…` is that of a layer. Errors: ValueError for one that is none."""
    try:
        return pattern.startswith("re:") and re.match(pattern.removeprefix("re:"), layer) is not None
    except re.error:
        raise ValueError(f"is chosen by {pattern!r}, which is no pattern") from None


def _packed_integers(weights: Mapping[str, Any], parts: Mapping[str, Tensor]) -> ScaledIntegers:
    """Integers in words, plus the middle so that they are unsigned; those of a row, or zeros of a column, follow."""
    bits = weights.get("num_bits")
    if bits not in (4, 8) or weights.get("type", "int") != "int":
        raise ValueError(f"has {weights.get('type')} of {bits} bits in words, only integers of 4 and 8 are read")
    words, scales = required(parts, "weight_packed", (WORDS,), 2), required(parts, "weight_scale", FLOATS, 2)
    outputs, inputs = (int(size) for size in _shape_of(parts, words, bits))
    groups = scales.shape[1]
    check_shape("weight_packed", words, outputs, -(-inputs * bits // 32))
    check_shape("weight_scale", scales, outputs, groups)
    zeros = torch.full((outputs, groups), 1 << bits - 1, dtype=torch.uint8)
    if not weights.get("symmetric", True):
        packed = required(parts, "weight_zero_point", (WORDS,), 2)
        check_shape("weight_zero_point", packed, -(-outputs * bits // 32), groups)
        zeros = unpack_words(packed.T, bits).T[:outputs]
    unsigned = unpack_words(words, bits)[:, :inputs]
    return unsigned_groups(unsigned, zeros, scales, bits, group_of_inputs(parts.get("weight_g_idx"), inputs, groups))


def _shape_of(parts: Mapping[str, Tensor], words: Tensor, bits: int) -> tuple[int, int]:
    """The outputs and inputs of a weight: as it says itself, else by its words."""
    if "weight_shape" not in parts:
        return len(words), words.shape[1] * 32 // bits
    shape = required(parts, "weight_shape", INTEGERS, 1)
    check_shape("weight_shape", shape, 2)
    return int(shape[0]), int(shape[1])


def _plain_integers(weights: Mapping[str, Any], parts: Mapping[str, Tensor]) -> ScaledIntegers:
    """Integers in bytes of their own, with signed zeros."""
    integers, scales = required(parts, "weight", (torch.int8,), 2), _scales(parts)
    (outputs, inputs), groups = integers.shape, scales.shape[1]
    if len(scales) not in (1, outputs):
        raise ValueError(f"has weight_scale {list(scales.shape)} of {[outputs, inputs]}")
    zeros = torch.zeros(groups)
    if "weight_zero_point" in parts or not weights.get("symmetric", True):
        zeros = required(parts, "weight_zero_point", INTEGERS, len(parts.get("weight_zero_point", zeros).shape))
    if zeros.numel() not in (groups, outputs * groups):
        raise ValueError(f"has weight_zero_point {list(zeros.shape)} of {[outputs, inputs]}")
    scales, zeros = (each.reshape(-1, groups).expand(outputs, -1) for each in (scales, zeros.short() + 128))
    group_numbers = group_of_inputs(parts.get("weight_g_idx"), inputs, groups)
    return unsigned_groups(integers.short() + 128, zeros, scales, 8, group_numbers)


def _scales(parts: Mapping[str, Tensor]) -> Tensor:
    """Scales of integers or floats [out or 1, groups]."""
    scales = parts.get("weight_scale")
    if scales is not None and scales.ndim < 2:
        return required(parts, "weight_scale", FLOATS, scales.ndim).reshape(-1, 1)
    return required(parts, "weight_scale", FLOATS, 2)


def _integers_or_floats(weights: Mapping[str, Any], parts: Mapping[str, Tensor]) -> ScaledIntegers | ScaledFloats:
    """Weights in their own bytes."""
    if weights.get("type") != "float":
        return _plain_integers(weights, parts)
    values, block = required(parts, "weight", fp8.FLOATS, 2), weights.get("block_structure")
    settings = {} if block is None else {"weight_block_size": block}
    return fp8.scaled(values, _scales(parts), fp8.block_of(settings))


def _nvidia_floats(weights: Mapping[str, Any], parts: Mapping[str, Tensor]) -> FourBitFloats:
    """NVFP4: floats of 4 bits, an 8-bit float for each 16 that multiplies them, and one of all that divides them."""
    of_all = required(parts, "weight_global_scale", (torch.float32,), 1)
    return four_bit_floats(parts, "weight_packed", 1 / of_all)


def four_bit_floats(parts: Mapping[str, Tensor], name: str, of_all: Tensor) -> FourBitFloats:
    """Floats of 4 bits in the bytes of a part, times the 8-bit float of their 16 and that of all."""
    pairs = required(parts, name, (torch.uint8,), 2)
    scales = required(parts, "weight_scale", fp8.FLOATS, 2)
    check_shape("weight_scale", scales, len(pairs), pairs.shape[1] // 8)
    check_shape("the scale of all", of_all.flatten(), 1)
    return FourBitFloats(unpack_words(pairs, 4), scales, of_all.flatten())


def _microscaled_floats(weights: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Blocks:
    return microscaled_floats(parts, "weight_packed")


def microscaled_floats(parts: Mapping[str, Tensor], name: str) -> Blocks:
    """MXFP4 as in gpt-oss, of single matrices [out, in], in the bytes of a part."""
    pairs = required(parts, name, (torch.uint8,), 2)
    exponents = required(parts, "weight_scale", (torch.uint8,), 2)
    check_shape(name, pairs, len(exponents), 16 * exponents.shape[1])
    return Blocks(blocks_of_pairs(pairs.unflatten(1, (-1, 16)), exponents), GGMLQuantizationType.MXFP4)


READERS = {
    "pack-quantized": _packed_integers, "int-quantized": _integers_or_floats, "float-quantized": _integers_or_floats,
    "naive-quantized": _integers_or_floats, "nvfp4-pack-quantized": _nvidia_floats,
    "mxfp4-pack-quantized": _microscaled_floats,
}  # fmt: skip
