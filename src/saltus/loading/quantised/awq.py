"""AWQ (Lin et al. 2024), as AutoAWQ writes it (version gemm): integers of 4 bits with scales and zeros.

weight[out, i] = scales[g, out] · (q[i, out] − zero[g, out]) with the group g of the input i. Words hold 8 outputs, in
the order 0 2 4 6 1 3 5 7: `qweight` [in, out / 8], `qzeros` [groups, out / 8].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from saltus.loading.quantised.gptq import FLOATS, unsigned_groups
from saltus.loading.quantised_numbers import WORDS, ScaledIntegers, check_groups, check_shape, required, unpack_words

PARTS = dict.fromkeys(("qweight", "qzeros", "scales"), "weight")
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # in a word, of each output


def read(settings: Mapping[str, Any], name: str, parts: Mapping[str, Tensor]) -> ScaledIntegers:
    """See saltus.loading.quantised."""
    version, bits = str(settings.get("version") or settings.get("format") or "gemm").lower(), settings.get("bits", 4)
    if version != "gemm" or bits != 4:
        raise ValueError(f"is in the version {version} of {bits} bits, of AWQ's only gemm of 4 bits is read")
    words, scales = required(parts, "qweight", (WORDS,), 2), required(parts, "scales", FLOATS, 2)
    packed_zeros = required(parts, "qzeros", (WORDS,), 2)
    inputs, (groups, outputs) = len(words), scales.shape
    check_shape("qweight", words, inputs, outputs // 8)
    check_shape("qzeros", packed_zeros, groups, outputs // 8)
    check_shape("scales", scales, groups, words.shape[1] * 8)
    check_groups(inputs, groups)
    unsigned, zeros = (
        unpack_words(each, 4).unflatten(1, (-1, 8))[..., PLACES].flatten(1).T for each in (words, packed_zeros)
    )
    return unsigned_groups(unsigned, zeros, scales.T, 4)
