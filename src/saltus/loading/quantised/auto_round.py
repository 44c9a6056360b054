"""Weights that AutoRound (Cheng et al. 2023) rounded, in the forms of GPTQ and AWQ that it writes by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from saltus.loading.quantised import awq, gptq
from saltus.loading.quantised_numbers import ScaledIntegers

PARTS = gptq.PARTS | awq.PARTS
STORED_LIKE = {  # by packing_format
    "auto_round:auto_gptq": (gptq, {"checkpoint_format": "gptq"}),
    "auto_round:gptqmodel": (gptq, {"checkpoint_format": "gptq_v2"}),
    "auto_round": (gptq, {"checkpoint_format": "gptq_v2"}),
    "auto_round:auto_awq": (awq, {"version": "gemm"}),
}

ROTATIONS = ("rotation_config", "spinquant_config", "hadamard_config")


def read(settings: Mapping[str, Any], name: str, parts: Mapping[str, Tensor]) -> ScaledIntegers:
    """See saltus.loading.quantised."""
    form = str(settings.get("packing_format"))
    if form not in STORED_LIKE:
        raise ValueError(f"is in the form {form}, of AutoRound's only {', '.join(STORED_LIKE)} are read")
    if rotated := next((key for key in ROTATIONS if settings.get(key)), None):
        raise ValueError(f"is stored with a {rotated}, which is not read")
    method, known = STORED_LIKE[form]
    return method.read({"bits": settings.get("bits", 4)} | known, name, parts)
