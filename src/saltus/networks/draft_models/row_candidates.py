"""Find the likely tokens of many positions at once, by a compiled kernel where there is one."""

from __future__ import annotations

import ctypes

import numpy as np
from jaxtyping import Float
from torch import Tensor

from saltus.core.sampling import float_row
from saltus.drafting.draft_tree import MAX_GAP, LikelyTokens, likely_tokens, most_likely
from saltus.networks.models.exact import native


def rows_likely_tokens(logits: Float[Tensor, "positions vocab"]) -> list[LikelyTokens]:
    """`likely_tokens` of each row."""
    kernel = native.kernel("near_greatest", logits.dtype, logits.device)
    if kernel is None:
        return [likely_tokens(row) for row in float_row(logits)]
    logits = logits.contiguous()
    rows, vocab = logits.shape
    places, values = np.empty((rows, vocab), dtype=np.int32), np.empty((rows, vocab), dtype=np.float32)
    counts, totals = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.float32)
    found = {"places": places, "values": values, "counts": counts, "totals": totals}
    pointers = {name: array.ctypes.data for name, array in found.items()}
    struct = native.NearGreatest(x=logits.data_ptr(), rows=rows, size=vocab, gap=MAX_GAP, **pointers)
    kernel(ctypes.byref(struct))
    return [
        most_likely(places[row, :count].astype(np.int64), values[row, :count], float(totals[row]))
        for row, count in enumerate(counts.tolist())
    ]
