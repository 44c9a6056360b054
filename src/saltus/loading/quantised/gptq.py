"""GPTQ (Frantar et al. 2023), as AutoGPTQ and GPTQModel write it: integers of 2, 3, 4 or 8 bits with scales and zeros.

weight[out, i] = scales[g, out] · (q[i, out] − zero[g, out]) with the group g of the input i. Words of `qweight`
[in · bits / 32, out] hold inputs beside each other, those of `qzeros` [groups, out · bits / 32] outputs. The first form
of the files stores zeros less one. With `desc_act` the inputs of a group do not stand beside each other: `g_idx` has
the group of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from saltus.loading.quantised_numbers import WORDS, ScaledIntegers, check_groups, check_shape, required, unpack_words

PARTS = dict.fromkeys(("qweight", "qzeros", "scales", "g_idx"), "weight")
STORED_LESS = {"gptq": 1, "gptq_v2": 0}  # by checkpoint_format: what was taken off zeros
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def read(settings: Mapping[str, Any], name: str, parts: Mapping[str, Tensor]) -> ScaledIntegers:
    """See saltus.loading.quantised."""
    form = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if form not in STORED_LESS or settings.get("is_marlin_format"):
        raise ValueError(f"is in the form {form}, of GPTQ's only {' and '.join(STORED_LESS)} are read")
    words, scales = required(parts, "qweight", (WORDS,), 2), required(parts, "scales", FLOATS, 2)
    packed_zeros = required(parts, "qzeros", (WORDS,), 2)
    bits = _bits(packed_zeros, scales)
    inputs, (groups, outputs) = len(words) * 32 // bits, scales.shape
    check_shape("qweight", words, inputs * bits // 32, outputs)
    check_shape("qzeros", packed_zeros, groups, outputs * bits // 32)
    zeros = unpack_words(packed_zeros, bits) + STORED_LESS[form] & (1 << bits) - 1
    group_numbers = group_of_inputs(parts.get("g_idx"), inputs, groups)
    return unsigned_groups(unpack_words(words.T, bits), zeros.T, scales.T, bits, group_numbers)


def _bits(zeros: Tensor, scales: Tensor) -> int:
    """Those of this weight, by the words of its zeros: some checkpoints store a few weights with more than others."""
    bits = 32 * zeros.shape[1] / scales.shape[1]
    if bits not in (2, 3, 4, 8):
        raise ValueError(f"has integers of {bits:g} bits, of GPTQ's only those of 2, 3, 4 and 8 are read")
    return int(bits)


def group_of_inputs(given: Tensor | None, inputs: int, groups: int) -> Tensor | None:
    """The group of each input, where inputs of a group do not stand beside each other. Errors: ValueError."""
    numbers = torch.empty(0) if given is None else given.flatten().long()
    if (numbers == -1).all():  # which says nothing
        check_groups(inputs, groups)
        return None
    check_shape("g_idx", numbers, inputs)
    if numbers.min() < 0 or numbers.max() >= groups:
        raise ValueError(f"has g_idx of {int(numbers.min())} to {int(numbers.max())}, but {groups} groups")
    in_order = inputs % groups == 0 and torch.equal(numbers, torch.arange(inputs) // (inputs // groups))
    return None if in_order else numbers


def unsigned_groups(
    unsigned: Tensor, zeros: Tensor, scales: Tensor, bits: int, group_numbers: Tensor | None = None
) -> ScaledIntegers:
    """The weights scales · (unsigned − zeros): unsigned [out, in]; zeros and scales [out, groups].

    Where a zero is not the middle, integers may take a bit more; those of 4 bits then always have 5, so that the
    experts of a layer have one format.
    """
    if group_numbers is not None:
        zeros, scales = zeros[:, group_numbers], scales[:, group_numbers]
    signed = torch.int8 if bits < 8 else torch.int16
    grouped = unsigned.to(signed).unflatten(1, (scales.shape[1], -1))
    integers = (grouped - zeros.to(signed)[..., None]).flatten(1)
    middle = 1 << bits - 1
    fits = bool((zeros == middle).all()) or (bits == 8 and -middle <= integers.min() and integers.max() < middle)
    return ScaledIntegers(integers, scales, max(bits, 4) if fits or bits < 4 else bits + 1)
