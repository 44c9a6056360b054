"""Walk a draft tree as the rule `match` does, by a compiled kernel on the raw logits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

import torch

from saltus.core.distributions import TargetDistributions
from saltus.kernels import native
from saltus.kernels.native import structs


class Walk(ctypes.Structure):
    """The struct `Walk` of kernels.h, field for field."""

    _fields_ = [
        *((name, structs.POINTER) for name in ("logits", "tokens", "parents", "keys")),
        *((name, structs.INTEGER) for name in ("vocab", "nodes", "positions")),
        ("temperature", structs.REAL),
        ("decided", structs.POINTER),
        *((name, structs.INTEGER) for name in ("last", "ended")),
        *((name, structs.POINTER) for name in ("banned", "ends")),
        *((name, structs.INTEGER) for name in ("num_banned", "num_ends")),
    ]


@lru_cache
def _kernel(dtype: torch.dtype) -> Callable[..., int] | None:
    return native.kernel("walk", dtype, torch.device("cpu"))


def followed_tokens(distributions: TargetDistributions) -> tuple[list[int], int, bool]:
    """The first tokens that `match` decides, the last node that it accepts by them, and whether these are all.

    No tokens where there is no kernel, or where more than logits, bans and the noise decides.
    """
    inputs, outputs, sampling = distributions.inputs, distributions.outputs, distributions.sampling
    logits = outputs.logits
    if (
        not sampling.has_argmax
        or distributions.constraint is not None
        or outputs.token_ids is not None
        or (outputs.likeliest is not None and sampling.token_independent)  # a device has looked
        or not logits.is_cpu
        or (walk := _kernel(logits.dtype)) is None
        or not logits.is_contiguous()
    ):
        return [], -1, False
    canvas, nodes = inputs.canvas, inputs.num_draft_tokens
    first, still_open = canvas.num_decided, len(canvas.order) - canvas.num_decided
    positions = min(still_open, nodes + 1)
    keys = None
    if not sampling.greedy:
        keys = distributions.noise.keys_of_tokens("text", canvas.order[first : first + positions])
    rows = structs.INTEGER * nodes
    tokens, parents = rows(*inputs.tokens[:nodes]), rows(*inputs.parents[:nodes])
    decided = (structs.INTEGER * positions)()
    struct = Walk(
        logits.data_ptr(), ctypes.addressof(tokens), ctypes.addressof(parents),
        None if keys is None else native.address(keys), logits.shape[1], nodes, positions, sampling.temperature,
        ctypes.addressof(decided),
    )  # fmt: skip
    if sampling.banned:
        struct.banned, struct.num_banned = native.address(sampling.banned_ids), len(sampling.banned_ids)
    if sampling.hole_end_tokens:
        struct.ends, struct.num_ends = native.address(sampling.hole_end_ids), len(sampling.hole_end_ids)
    count = walk(ctypes.byref(struct))
    found = decided[:count]
    is_complete = bool(struct.ended) or count == still_open or (count > 0 and distributions.ends_hole(found))
    return found, struct.last, is_complete
